import io

from verl_omni_core.report.progress import REWARD, THROUGHPUT, Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_steps_and_messages_are_plain_lines() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, clock=clock) as progress:
        progress.start("demo", steps=4)
        progress.stage(1, "rollout")
        clock.now += 10
        progress.step_done(1, {REWARD: 0.5, THROUGHPUT: 9.6})
        progress.message("saved [bold]a[/bold] checkpoint")
    assert stream.getvalue().splitlines() == [
        "run demo: 4 steps",
        "step 1/4  reward 0.5000  9.60 samples/s  10 s, 30 s left",
        "saved [bold]a[/bold] checkpoint",
    ]


def test_absent_metrics_are_dashes_not_numbers() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream)
    progress.start("demo", steps=1)
    progress.step_done(1, {})
    assert "reward -  - samples/s" in stream.getvalue()


def test_time_left_follows_the_recent_steps() -> None:
    clock = Clock()
    progress = Progress(stream=io.StringIO(), clock=clock)
    progress.start("demo", steps=10, step=2)
    assert progress.seconds_left() is None
    for step, seconds in ((3, 10), (4, 20)):
        clock.now += seconds
        progress.step_done(step, {})
    assert progress.seconds_left() == 15 * 6


def test_a_validation_shows_the_main_mean() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream)
    progress.start("demo", steps=1)
    progress.validated(0, {"val-aux/glyph/acc/mean@4": 0.1, "val-core/glyph/reward/mean@4": 0.5625})
    assert "held-out reward 0.5625 (val-core/glyph/reward/mean@4)" in stream.getvalue()


def test_on_a_terminal_the_panel_shows_step_stage_and_reward() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream, terminal=True)
    progress.start("demo", steps=4)
    progress.stage(2, "update")
    progress.step_done(2, {REWARD: 0.25})
    progress.message("a message")
    progress.stop()
    progress.stop()
    shown = stream.getvalue()
    for text in ("step 2/4", "update", "reward 0.2500", "a message"):
        assert text in shown, text
    assert "\x1b[" in shown
