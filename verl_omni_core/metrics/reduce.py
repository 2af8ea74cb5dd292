"""From values of rows, micro-batches and ranks to one number a metric, by its declared reduction.

Everything goes through sums over rows, so the result does not depend on how rows were batched: a mean of micro-batch
means would weigh the rows of a small last micro-batch more.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from verl_omni_core.metrics.names import Reduction, metric_of

State = dict[str, tuple[float, float, float, float, float, float]]
"""Name to ``(weight, mean, squares, low, high, last)``; plain numbers, so it crosses processes as JSON."""


class Accumulator:
    """Collects values of metrics; merges with those of other ranks."""

    def __init__(self, state: Mapping[str, Iterable[float]] | None = None) -> None:
        self._state: State = {name: _moments(values) for name, values in (state or {}).items()}

    def add(self, values: Mapping[str, Tensor | float], weights: Tensor | None = None) -> None:
        """Add values of rows or single values.

        Args:
            values: name to [B] tensor, one value a row, or to a number, which counts as one row.
            weights: [B], 0 for rows that do not count (padding, invalid samples) and 1 for others; none counts all.

        Raises:
            ValueError: the number of weights is not the number of rows.
        """
        for name, value in values.items():
            rows = torch.as_tensor(value).detach().to("cpu", torch.float64).reshape(-1)
            scalar = not isinstance(value, Tensor) or value.ndim == 0
            kept = torch.ones_like(rows) if weights is None or scalar else weights.detach().to("cpu", torch.float64)
            if kept.shape != rows.shape:
                raise ValueError(f"{name} has {len(rows)} rows and {len(kept)} weights; expected one a row")
            rows, kept = rows[kept > 0], kept[kept > 0]
            if len(rows):
                self._merge(name, _moments_of(rows, kept))

    def merge(self, other: "Accumulator | Mapping[str, Iterable[float]]") -> None:
        """Add what another accumulator, or its :meth:`state`, collected."""
        for name, values in (other.state() if isinstance(other, Accumulator) else other).items():
            self._merge(name, _moments(values))

    def state(self) -> State:
        """Return what was collected, as plain numbers."""
        return dict(self._state)

    def result(self) -> dict[str, float]:
        """Return each metric by its declared reduction; one that is not in the list of names reduces to its mean."""
        return {name: _reduce(values, _reduction(name)) for name, values in self._state.items()}

    def _merge(self, name: str, new: tuple[float, float, float, float, float, float]) -> None:
        old = self._state.get(name)
        if old is None:
            self._state[name] = new
            return
        weight = old[0] + new[0]
        # Chan's update: sums of raw squares would lose the spread of ratios that differ from 1 by 1e-5
        shift = new[1] - old[1]
        self._state[name] = (
            weight,
            old[1] + shift * new[0] / weight,
            old[2] + new[2] + shift * shift * old[0] * new[0] / weight,
            min(old[3], new[3]),
            max(old[4], new[4]),
            new[5],
        )


def reduce_rows(values: Tensor, reduction: Reduction, weights: Tensor | None = None) -> float:
    """Return one number for the values of rows.

    Args:
        values: [B]. weights: [B], 0 for rows that do not count.

    Raises:
        ValueError: no row counts.
    """
    rows = values.detach().to("cpu", torch.float64).reshape(-1)
    kept = torch.ones_like(rows) if weights is None else weights.detach().to("cpu", torch.float64).reshape(-1)
    rows, kept = rows[kept > 0], kept[kept > 0]
    if not len(rows):
        raise ValueError("no row counts, so there is nothing to reduce; leave the metric out")
    return _reduce(_moments_of(rows, kept), reduction)


def _reduction(name: str) -> Reduction:
    metric = metric_of(name)
    return metric.reduction if metric is not None else "mean"


def _moments_of(rows: Tensor, weights: Tensor) -> tuple[float, float, float, float, float, float]:
    weight = weights.sum()
    mean = (weights * rows).sum() / weight
    squares = (weights * (rows - mean).square()).sum()
    return _moments(map(float, (weight, mean, squares, rows.min(), rows.max(), rows[-1])))


def _moments(values: Iterable[float]) -> tuple[float, float, float, float, float, float]:
    weight, mean, squares, low, high, last = values
    return weight, mean, squares, low, high, last


def _reduce(values: tuple[float, float, float, float, float, float], reduction: Reduction) -> float:
    weight, mean, squares, low, high, last = values
    if reduction == "std":
        return math.sqrt(squares / (weight - 1)) if weight > 1 else 0.0
    return {"mean": mean, "sum": mean * weight, "max": high, "min": low, "last": last}[reduction]
