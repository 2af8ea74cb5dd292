"""Scores samples: every scorer of a sample at once, in threads, with retries and a deadline.

The class is plain; as a Ray actor it is an asynchronous one, so that many samples are in it at the same time.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl_omni_core import registry
from verl_omni_core.errors import ContractError
from verl_omni_core.rewards._combine import check_scorers
from verl_omni_core.rewards._contract import Score, Scorer, ScoringItem
from verl_omni_core.settings.reward import RewardSettings

DEFAULT_CONCURRENCY = 32
MOST_ABANDONED = 8
_FIRST_PAUSE_S = 0.1


@dataclass
class _Lane:
    """One scorer, the bound on its concurrent calls, and its calls that outlived their deadline."""

    scorer: Scorer
    concurrency: int
    free: asyncio.Semaphore | None = None
    abandoned: list[threading.Thread] = field(default_factory=list)


class RewardWorker:
    """Scores samples with the scorers of the settings."""

    def __init__(self, settings: RewardSettings) -> None:
        """Build the scorers.

        Raises: ConfigError for two scorers of one name, unusable weights or options; what building a scorer raises.
        """
        check_scorers(settings.scorers)
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finished = 0
        self._lanes: dict[str, _Lane] = {}
        for entry in settings.scorers:
            component = registry.component("reward", entry.name)
            scorer = component.build(registry.options("reward", entry.name, entry.options))
            self._lanes[entry.name] = _Lane(scorer, getattr(scorer, "CONCURRENCY", DEFAULT_CONCURRENCY))

    async def ping(self) -> int:
        """Return how many scores have been finished, failed ones included: a worker that hangs stands still."""
        return self._finished

    async def versions(self) -> dict[str, str]:
        """Return the version of each scorer, by name."""
        return {name: lane.scorer.VERSION for name, lane in self._lanes.items()}

    async def ranges(self) -> dict[str, tuple[float, float]]:
        """Return the least and the largest score of each scorer, by name."""
        return {name: lane.scorer.RANGE for name, lane in self._lanes.items()}

    async def score(self, items: Sequence[ScoringItem]) -> list[dict[str, Score]]:
        """Score samples.

        Returns: for each item, in order, the score of each scorer by name. Whatever fails becomes a missing score with
            a reason; nothing is raised for a sample. A scorer has ``reward.timeout_s`` for a sample, all its attempts
            together, from the moment it is free for it.
        """
        self._bind_to_running_loop()
        return list(await asyncio.gather(*(self._score_sample(item) for item in items)))

    def _bind_to_running_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            for lane in self._lanes.values():
                lane.free = asyncio.Semaphore(lane.concurrency)

    async def _score_sample(self, item: ScoringItem) -> dict[str, Score]:
        scores = await asyncio.gather(*(self._score_in_lane(lane, item) for lane in self._lanes.values()))
        return dict(zip(self._lanes, scores, strict=True))

    async def _score_in_lane(self, lane: _Lane, item: ScoringItem) -> Score:
        assert lane.free is not None
        async with lane.free:
            started = time.monotonic()
            score, attempts = await self._attempts(lane, item, started + self._settings.timeout_s)
            self._finished += 1
            return replace(score, attempts=attempts, latency_s=time.monotonic() - started)

    async def _attempts(self, lane: _Lane, item: ScoringItem, deadline: float) -> tuple[Score, int]:
        reason, attempt = "", 0
        for attempt in range(1, self._settings.max_attempts + 1):
            if attempt > 1:
                await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (attempt - 2), max(0.0, deadline - time.monotonic())))
            lane.abandoned = [thread for thread in lane.abandoned if thread.is_alive()]
            if len(lane.abandoned) >= MOST_ABANDONED:
                reason = f"{len(lane.abandoned)} earlier calls of this scorer still hang; restart the reward workers"
                return Score(None, reason, timed_out=True), attempt
            try:
                scores = await self._call(lane, lambda: lane.scorer.score([item]), deadline - time.monotonic())
                return _checked(scores), attempt
            except TimeoutError:
                reason = f"no score within {self._settings.timeout_s:g} s (reward.timeout_s)"
                return Score(None, reason, timed_out=True), attempt
            except Exception as error:  # noqa: BLE001 - becomes a missing score with this reason
                reason = f"{type(error).__name__}: {error}"
                if not getattr(error, "retryable", True):
                    break
        return Score(None, reason), attempt

    async def _call(self, lane: _Lane, function: Callable[[], Any], timeout_s: float) -> Any:
        """Run ``function`` in a thread of its own: one that hangs must not take a pooled thread with it."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def deliver(value: Any, error: BaseException | None) -> None:
            if result.done():
                return
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

        def run() -> None:
            value: Any = None
            error: BaseException | None = None
            try:
                value = function()
            except TimeoutError as raised:
                # the scorer's own, not the deadline's
                error = RuntimeError(f"{type(raised).__name__}: {raised}")
            except Exception as raised:  # noqa: BLE001 - raised where the call is awaited
                error = raised
            if not loop.is_closed():
                loop.call_soon_threadsafe(deliver, value, error)

        thread = threading.Thread(target=run, name="scorer", daemon=True)
        thread.start()
        try:
            return await asyncio.wait_for(result, max(timeout_s, 0.0))
        except TimeoutError:
            lane.abandoned.append(thread)
            raise


def _checked(scores: Any) -> Score:
    if not isinstance(scores, Sequence) or len(scores) != 1 or not isinstance(scores[0], Score):
        raise ContractError(f"the scorer returned {scores!r} for one item; expected a list of one Score")
    score = scores[0]
    if score.value is not None and not math.isfinite(score.value):
        return replace(score, value=None, error=f"the score is {score.value}, not a finite number")
    return score
