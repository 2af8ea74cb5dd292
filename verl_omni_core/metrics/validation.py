"""Statistics of held-out samples, and the interval of a difference between two policies.

Axes: ``P`` prompts, ``G`` samples of each. A missing score is ``nan`` and enters no statistic.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

BOOTSTRAP_DRAWS = 1000
BOOTSTRAP_SEED = 42


class Difference(NamedTuple):
    """A mean difference and the bounds of its interval, in reward units."""

    mean: float
    low: float
    high: float


def subset_sizes(samples: int) -> list[int]:
    """Return the ``k`` of best@k and worst@k: powers of two from 2 below ``samples``, and ``samples``."""
    sizes = []
    k = 2
    while k < samples:
        sizes.append(k)
        k *= 2
    return [*sizes, samples] if samples > 1 else []


def prompt_statistics(
    values_PG: ArrayLike, *, draws: int = BOOTSTRAP_DRAWS, seed: int = BOOTSTRAP_SEED
) -> dict[str, float]:
    """Return the statistics of one variable, each computed for every prompt and then averaged over prompts.

    ``mean@N`` and ``std@N`` (population) over a prompt's N samples; ``best@k/mean``, ``best@k/std``, ``worst@k/mean``
    and ``worst@k/std`` of the best and worst of k samples drawn with replacement, ``draws`` times.

    Args:
        values_PG: [P, G]; nan where a score is missing. A prompt without a score is left out.
        draws: bootstrap draws of each prompt and k.
        seed: of the draws; the same draws serve every prompt.

    Returns: an empty dictionary if there is no score at all.
    Raises: ValueError if the values have not two axes.
    """
    values = np.asarray(values_PG, dtype=np.float64)
    if values.ndim != 2:
        raise ValueError(f"values have shape {values.shape}; expected [prompts, samples]")
    prompts = [row[np.isfinite(row)] for row in values]
    prompts = [row for row in prompts if row.size]
    if not prompts:
        return {}
    samples = values.shape[1]
    statistics = {f"mean@{samples}": _average([row.mean() for row in prompts])}
    if samples > 1:
        statistics[f"std@{samples}"] = _average([row.std() for row in prompts])
    for k in subset_sizes(samples):
        # the draws of a prompt depend on its number of scores alone
        chosen = {size: _draws(size, k, draws, seed) for size in {row.size for row in prompts}}
        drawn = [row[chosen[row.size]] for row in prompts]
        for name, extreme in (("best", np.max), ("worst", np.min)):
            extremes = [extreme(row, axis=1) for row in drawn]
            statistics[f"{name}@{k}/mean"] = _average([row.mean() for row in extremes])
            statistics[f"{name}@{k}/std"] = _average([row.std() for row in extremes])
    return statistics


def validation_metrics(
    variables: Mapping[str, ArrayLike],
    sources: Sequence[str],
    *,
    draws: int = BOOTSTRAP_DRAWS,
    seed: int = BOOTSTRAP_SEED,
) -> dict[str, float]:
    """Return ``val-core/*`` and ``val-aux/*`` of a validation.

    The main variable of a data source is ``acc`` if there is one, else ``reward``; its ``mean`` and ``best`` at the
    full number of samples are ``val-core/{source}/{variable}/{statistic}``, all else is ``val-aux``, also the share of
    missing scores as ``invalid_fraction``.

    Args:
        variables: name to [P, G]; nan where a score is missing.
        sources: P names of the prompts' data sources.

    Raises:
        ValueError: a variable has not one row a prompt.
    """
    core = "acc" if "acc" in variables else "reward"
    metrics = {}
    for variable, values in variables.items():
        table = np.asarray(values, dtype=np.float64)
        if table.ndim != 2 or len(table) != len(sources):
            raise ValueError(f"{variable} has shape {table.shape} for {len(sources)} prompts; expected [P, G]")
        at_full = (f"mean@{table.shape[1]}", f"best@{table.shape[1]}/")
        for source in dict.fromkeys(sources):
            rows = table[[name == source for name in sources]]
            metrics[f"val-aux/{source}/{variable}/invalid_fraction"] = float((~np.isfinite(rows)).mean())
            for statistic, value in prompt_statistics(rows, draws=draws, seed=seed).items():
                kind = "val-core" if variable == core and statistic.startswith(at_full) else "val-aux"
                metrics[f"{kind}/{source}/{variable}/{statistic}"] = value
    return metrics


def paired_bootstrap(
    before_PG: ArrayLike,
    after_PG: ArrayLike,
    *,
    draws: int = 10_000,
    seed: int = BOOTSTRAP_SEED,
    confidence: float = 0.95,
) -> Difference:
    """Return the mean of ``after - before`` and its percentile interval, with prompts drawn anew.

    Samples are paired by prompt and seed, so what a prompt contributes to both sides cancels; prompts, not samples,
    are drawn, because samples of one prompt are alike.

    Args:
        before_PG, after_PG: [P, G] scores of the same prompts and seeds; a pair with a nan on either side is left out,
            and so is a prompt without a pair.
        draws: bootstrap draws. seed: of the draws. confidence: of the interval, between 0 and 1.

    Raises:
        ValueError: shapes differ, or no pair is left.
    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3.
    """
    before, after = np.asarray(before_PG, dtype=np.float64), np.asarray(after_PG, dtype=np.float64)
    if before.shape != after.shape or before.ndim != 2:
        raise ValueError(f"scores have shapes {before.shape} and {after.shape}; expected equal [prompts, samples]")
    gain = after - before
    paired = np.isfinite(gain)
    counts = paired.sum(axis=1)
    if not counts.any():
        raise ValueError("no sample has a score on both sides, so there is no difference to report")
    gains_P = np.where(paired, gain, 0.0).sum(axis=1)[counts > 0] / counts[counts > 0]
    chosen = np.random.default_rng(seed).integers(len(gains_P), size=(draws, len(gains_P)))
    tail = (1 - confidence) / 2
    low, high = np.quantile(gains_P[chosen].mean(axis=1), [tail, 1 - tail])
    return Difference(float(gains_P.mean()), float(low), float(high))


def _draws(size: int, k: int, draws: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(size, size=(draws, k))


def _average(values: Sequence[np.floating]) -> float:
    return float(np.mean(values))
