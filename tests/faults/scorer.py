"""The JPEG scorer, which sometimes hangs, raises or returns what is no number, as planned."""

import threading
from collections.abc import Sequence
from typing import Any

from tests.faults.injected import planned
from verl_omni_core.rewards import jpeg_size
from verl_omni_core.rewards._contract import Score, ScoringItem

_FOREVER_S = 3600.0


class FaultyScorer:
    """Scores as the JPEG scorer does, except where a fault is planned."""

    def __init__(self) -> None:
        self._scorer = jpeg_size.build(jpeg_size.Options())
        self.RANGE, self.VERSION = self._scorer.RANGE, self._scorer.VERSION

    def score(self, items: Sequence[ScoringItem]) -> list[Any]:
        scores = self._scorer.score(items)
        name = items[0].sample_id
        step = int(name[1:7]) if name[1:7].isdigit() else None
        action = planned.due("scorer", step=step)
        if action == "hang":
            threading.Event().wait(_FOREVER_S)
        if action == "raise":
            raise RuntimeError("the scorer's service answered 503")
        if action == "nan":
            return [Score(float("nan")) for _ in scores]
        if action == "text":
            return [Score("high") for _ in scores]  # type: ignore[arg-type]
        return list(scores)


def build(options: object) -> FaultyScorer:
    """Return the scorer."""
    return FaultyScorer()
