import io

from verl_omni_core.report.progress import REWARD, SAMPLES, SECONDS, Progress


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
        progress.step_done(1, {REWARD: 0.5, SAMPLES: 96.0, SECONDS: 10.0, "perf/throughput": 4.8})
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


def test_time_left_follows_the_recent_steps_from_their_beginning() -> None:
    clock = Clock()
    progress = Progress(stream=io.StringIO(), clock=clock)
    progress.start("demo", steps=10)
    clock.now += 500  # engines start
    progress.stage(0, "validate")
    clock.now += 300
    assert progress.seconds_left() is None
    for step, seconds in ((1, 10), (2, 20)):
        progress.stage(step, "plan")
        clock.now += seconds - 2
        progress.stage(step, "update")
        clock.now += 2
        progress.step_done(step, {SECONDS: seconds - 1.0})
    assert progress.seconds_left() == 15 * 8


def test_steps_done_before_say_nothing_of_the_time_left() -> None:
    """Of a resumed run one step is replayed from stored batches, one began in an earlier process, one is whole."""
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream=stream, clock=clock)
    progress.start("demo", steps=10, step=3)
    clock.now += 60
    progress.stage(2, "sync")
    for step, seconds, metrics in ((3, 1, {SECONDS: 20.0}), (4, 5, {}), (5, 18, {SECONDS: 18.0})):
        progress.stage(step, "plan")
        clock.now += seconds
        progress.step_done(step, metrics)
    assert progress.seconds_left() == 18 * 5
    lines = stream.getvalue().splitlines()
    assert lines[0] == "run demo: 10 steps, 3 done before"
    assert [line.partition("samples/s  ")[2] for line in lines[1:]] == [
        "1 s, - left",
        "5 s, - left",
        "18 s, 1 min 30 s left",
    ]


def test_a_validation_shows_the_mean_reward_whether_or_not_it_is_the_main_variable() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream)
    progress.start("demo", steps=1)
    progress.validated(0, {"val-aux/glyph/jpeg/mean@4": 0.1, "val-core/glyph/reward/mean@4": 0.5625})
    others = {"val-core/glyph/acc/mean@4": 0.5, "val-aux/glyph/reward/ocr/mean@4": 0.3}
    progress.validated(1, {**others, "val-aux/glyph/reward/mean@4": 0.75})
    lines = stream.getvalue().splitlines()[1:]
    assert lines == [
        "step 0: held-out reward 0.5625 (val-core/glyph/reward/mean@4)",
        "step 1: held-out reward 0.7500 (val-aux/glyph/reward/mean@4)",
    ]


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


def test_waiting_for_the_checkpoint_of_the_step_before_is_time_of_the_step_in_hand() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream=stream, clock=clock)
    progress.start("demo", steps=3)
    for step in (1, 2):
        progress.stage(step, "plan")
        clock.now += 10
        progress.stage(step - 1, "checkpoint")
        clock.now += 2
        progress.stage(step, "update")
        progress.step_done(step, {SECONDS: 12.0})
    assert progress.seconds_left() == 12
