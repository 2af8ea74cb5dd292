"""The live display of a run: step, stage, reward, throughput and time left; plain lines where there is no terminal."""

import math
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from verl_omni_core.report.summary import duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

REWARD = "critic/rewards/mean"
SAMPLES, SECONDS = "perf/total_num_images", "perf/time_per_step"
OF_THE_STEP_BEFORE = "checkpoint"
"""The stage that ends what the step before began: no step begins or goes back with it."""
_RECENT = 10
_MEAN_REWARD = re.compile(r"val-(core|aux)/.+/reward/mean@\d+")
"""An accuracy may be the main metric of a validation; the reward is what the run shows all along."""


@dataclass
class _State:
    run: str = ""
    steps: int = 0
    step: int = 0
    stage: str = "starting"
    done: int = 0
    reward: float = math.nan
    held_out: float = math.nan
    throughput: float = math.nan
    begun: float = 0.0
    """When the step in hand began; before that, when the last one ended."""
    step_seconds: list[float] = field(default_factory=list)
    """Of the last steps that ran here from their beginning."""


class Progress:
    """Shows a run as it goes. Call from one thread.

    On a terminal one panel is redrawn; elsewhere each finished step, validation and message is a line.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a display.

        Args:
            stream: where to; standard error by default, so that standard output holds results only.
            terminal: whether to redraw; by default, whether the stream is a terminal.
            clock: seconds, from any start.
        """
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty() if terminal is None else terminal
        self._clock = clock
        self._state = _State()
        self._live: Live | None = None

    def start(self, run: str, *, steps: int, step: int = 0) -> None:
        """Begin.

        Args:
            run: name of the run.
            steps: training steps in all.
            step: those done before, in a resumed run.
        """
        now = self._clock()
        self._state = _State(run=run, steps=steps, step=step, done=step, begun=now)
        if self._terminal:
            from rich.live import Live

            self._live = Live(self._table(), console=self._console(), refresh_per_second=4, transient=True)
            self._live.start()
        else:
            self._print(f"run {run}: {steps} steps" + (f", {step} done before" if step else ""))

    def stage(self, step: int, name: str) -> None:
        """Say which stage runs now."""
        if name != OF_THE_STEP_BEFORE:
            if step != self._state.step:  # start-up and a validation before the first step belong to none
                self._state.begun = self._clock()
            self._state.step = step
        self._state.stage = name
        self._redraw()

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step. A metric that is absent shows as a dash."""
        state, now = self._state, self._clock()
        seconds = now - state.begun
        # less than the step itself took: it, or a part of it, was done before
        if seconds >= metrics.get(SECONDS, math.inf):
            state.step_seconds = [*state.step_seconds, seconds][-_RECENT:]
        state.begun, state.done, state.step = now, step, step
        state.reward = metrics.get(REWARD, math.nan)
        state.throughput = metrics.get(SAMPLES, math.nan) / metrics.get(SECONDS, math.nan)
        if self._live is None:
            self._print(
                f"step {step}/{state.steps}  reward {_number(state.reward)}  {_number(state.throughput, 2)} samples/s  "
                f"{duration(seconds)}, {self._left()} left"
            )
        self._redraw()

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a validation: the mean reward of the first data source."""
        means = [(name, value) for name, value in metrics.items() if _MEAN_REWARD.fullmatch(name)]
        if means:
            self._state.held_out = means[0][1]
            self.message(f"step {step}: held-out reward {means[0][1]:.4f} ({means[0][0]})")

    def message(self, text: str) -> None:
        """Show a line that stays."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self._print(text)

    def stop(self) -> None:
        """End, leaving the terminal as it was. Doing it twice is harmless."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def seconds_left(self) -> float | None:
        """Return the expected seconds to the last step, from the recent steps; none before the first."""
        recent = self._state.step_seconds
        if not recent:
            return None
        return sum(recent) / len(recent) * max(self._state.steps - self._state.done, 0)

    def _left(self) -> str:
        left = self.seconds_left()
        return "-" if left is None else duration(left)

    def _console(self) -> "Console":
        from rich.console import Console

        return Console(file=self._stream, force_terminal=self._terminal)

    def _table(self) -> "Table":
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        state = self._state
        table = Table.grid(padding=(0, 2))
        table.add_row(f"run {state.run}", ProgressBar(total=max(state.steps, 1), completed=state.done, width=30))
        table.add_row(f"step {state.step}/{state.steps}", state.stage)
        table.add_row(f"reward {_number(state.reward)}", f"held-out {_number(state.held_out)}")
        table.add_row(f"{_number(state.throughput, 2)} samples/s", f"{self._left()} left")
        return table

    def _redraw(self) -> None:
        if self._live is not None:
            self._live.update(self._table())

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def _number(value: float, digits: int = 4) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"
