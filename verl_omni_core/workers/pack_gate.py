"""Lets the samples of a pack into the engine together, in the order of their places.

In deterministic mode a row is computed at its own place of a batch of fixed shape. Messages arrive in any order, and
two samples that claim one place cost a whole batch more. Rows that follow each other never do, wherever it is cut.
"""

import asyncio
from dataclasses import dataclass, field

from verl_omni_core.rollout._contract import SampleRequest

GAP_S = 0.25
"""A pack that lacks samples enters without them after this long without a new one: what is left may have failed."""


@dataclass
class _Gathering:
    waiting: list[tuple[int, asyncio.Future[None]]] = field(default_factory=list)
    """Place and waiting call of each sample that has come."""
    timer: asyncio.TimerHandle | None = None


class PackGate:
    """One gate in front of an engine; belongs to one event loop."""

    def __init__(self, gap_s: float = GAP_S) -> None:
        self._gap_s = gap_s
        self._packs: dict[str, _Gathering] = {}

    async def enter(self, request: SampleRequest) -> None:
        """Return when the request may go to the engine; at once for one without a named pack."""
        pack = request.pack
        if pack is None or not pack.name:
            return
        loop = asyncio.get_running_loop()
        gathering = self._packs.setdefault(pack.name, _Gathering())
        turn: asyncio.Future[None] = loop.create_future()
        gathering.waiting.append((pack.index, turn))
        if gathering.timer is not None:
            gathering.timer.cancel()
        # not opened here: this call would go on at once, ahead of those that wait
        is_complete = len(gathering.waiting) >= pack.count
        gathering.timer = loop.call_later(0 if is_complete else self._gap_s, self._open, pack.name)
        await turn

    def _open(self, name: str) -> None:
        for _, turn in sorted(self._packs.pop(name).waiting, key=lambda sample: sample[0]):
            if not turn.done():  # else its caller has given up
                turn.set_result(None)
