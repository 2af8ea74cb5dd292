"""What a scorer offers: one number a sample, or a missing one with a reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class ScoringItem:
    """One finished sample as scorers see it."""

    sample_id: str
    image: np.ndarray
    """uint8 [C, H, W]."""
    prompt: str
    ground_truth: str | None = None
    data_source: str | None = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """The result of one scorer on one sample; ``value`` is none exactly if ``error`` says why."""

    value: float | None
    error: str | None = None
    extra: Mapping[str, float | str] = field(default_factory=dict)
    timed_out: bool = False
    """Whether it is missing because a deadline passed."""
    attempts: int = field(default=1, compare=False)
    latency_s: float = field(default=0.0, compare=False)
    """Seconds of all attempts together."""

    @property
    def status(self) -> str:
        """``ok``, ``failed`` or ``timeout``."""
        if self.value is not None:
            return "ok"
        return "timeout" if self.timed_out else "failed"


class Scorer(Protocol):
    """A component's ``build(options)`` returns one. A batch in, as many scores out, in order.

    It is called from several threads, at most ``CONCURRENCY`` at once (an optional class attribute; a scorer that
    computes says 1, one that waits for a service more). ``VERSION`` changes whenever a score may.
    """

    RANGE: tuple[float, float]
    VERSION: str

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Score a batch. May raise: the caller turns that into missing values after its retries."""
        ...
