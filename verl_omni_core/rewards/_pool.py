"""Send samples to the reward worker that has least to do, and live with a worker that dies or hangs."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any

from verl_omni_core.errors import ConfigError
from verl_omni_core.rewards._contract import Score, ScoringItem

_PING_S = 30.0
_GRACE_S = 10.0
_AGAIN_S = 60.0
"""After this long a lost worker is asked again: an actor may have been restarted."""


class ScorerPool:
    """Several reward workers as one. Workers are Ray actor handles, or plain objects with the same methods."""

    def __init__(self, workers: Sequence[Any], scorers: Sequence[str], *, timeout_s: float) -> None:
        """Make a pool.

        Args:
            workers: with ``score(items)``, and with ``ping()`` that returns how many scores they have finished.
            scorers: names of the scores that a sample must get.
            timeout_s: the workers' deadline of one sample and scorer. A worker that finishes nothing for longer hangs.
        """
        if not workers:
            raise ConfigError("a pool of scorers needs at least one reward worker; set reward.workers to 1 or more")
        self._workers = list(workers)
        self._scorers = list(scorers)
        self._timeout_s = timeout_s
        self._in_flight = [0] * len(self._workers)
        self._lost: dict[int, tuple[float, str]] = {}

    @property
    def in_flight(self) -> list[int]:
        """Samples that each worker is busy with."""
        return list(self._in_flight)

    async def score(self, item: ScoringItem) -> dict[str, Score]:
        """Score one sample on the least-loaded worker, on another one if that is lost.

        Returns: the scores by scorer; all missing, with the reason, if no worker is left.
        """
        tried: set[int] = set()
        while True:
            alive = [i for i in range(len(self._workers)) if i not in tried and self._may_live(i)]
            if not alive:
                reason = f"all reward workers are lost: {'; '.join(why for _, why in self._lost.values())}"
                return {name: Score(None, reason) for name in self._scorers}
            chosen = min(alive, key=lambda i: (self._in_flight[i], i))
            tried.add(chosen)
            self._in_flight[chosen] += 1
            try:
                (scores,) = await self._ask(chosen, item)
                self._lost.pop(chosen, None)
                return scores
            except Exception as error:  # noqa: BLE001 - a sample's failure is a score; this is the worker's own end
                self._lost[chosen] = (time.monotonic(), f"worker {chosen}: {type(error).__name__}: {error}")
            finally:
                self._in_flight[chosen] -= 1

    async def score_all(self, items: Sequence[ScoringItem]) -> list[dict[str, Score]]:
        """Score samples side by side; results in order."""
        return list(await asyncio.gather(*(self.score(item) for item in items)))

    def _may_live(self, index: int) -> bool:
        return index not in self._lost or time.monotonic() - self._lost[index][0] > _AGAIN_S

    async def _ask(self, index: int, item: ScoringItem) -> list[dict[str, Score]]:
        worker = self._workers[index]
        answer = asyncio.ensure_future(_awaited(_call(worker.score, [item])))
        patience, finished = self._timeout_s + _GRACE_S, None
        try:
            while True:
                done, _ = await asyncio.wait({answer}, timeout=patience)
                if done:
                    return answer.result()
                before, finished = finished, await asyncio.wait_for(_awaited(_call(worker.ping)), _PING_S)
                # others may queue before this sample, so only a standstill is a fault
                if before == finished:
                    raise TimeoutError(f"no score finished in {patience:.0f} s")
        finally:
            answer.cancel()


def _call(method: Any, *args: Any) -> Awaitable[Any]:
    """Call a method of a Ray actor or of a plain object."""
    return getattr(method, "remote", method)(*args)


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer
