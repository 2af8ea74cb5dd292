"""One reward a sample from the scores of several scorers."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from verl_omni_core.errors import ConfigError, ContractError
from verl_omni_core.rewards._contract import Score
from verl_omni_core.settings.reward import ScorerSettings

Missing = Literal["invalid", "zero"]


def check_scorers(scorers: Sequence[ScorerSettings]) -> None:
    """Refuse scorers that one reward cannot be made of.

    Raises: ConfigError for two of one name, or as :func:`check_weights`.
    """
    names = [scorer.name for scorer in scorers]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(
            f"reward.scorers names {', '.join(map(repr, repeated))} more than once; scores are told apart by the "
            "scorer's name, so name each once"
        )
    check_weights({scorer.name: scorer.weight for scorer in scorers})


def check_weights(weights: Mapping[str, float]) -> None:
    """Refuse weights that no reward can be made of.

    Raises: ConfigError without a scorer, for a weight that is not finite, or if the sum is not positive.
    """
    total = sum(weights.values())
    if not weights or not math.isfinite(total) or total <= 0:
        raise ConfigError(
            f"reward.scorers: the weights are {dict(weights)}, their sum {total}; give at least one scorer "
            "and finite weights with a positive sum"
        )


def combine(
    scores: Mapping[str, Sequence[Score]], weights: Mapping[str, float], *, missing: Missing = "invalid"
) -> tuple[np.ndarray, np.ndarray]:
    """Add the scores of each sample, weighted as given: ``sum over scorers of weight * score``.

    A sample that lacks one score has no reward, because zero is a very good value for one scorer and a very bad one
    for another.

    Args:
        scores: by scorer, N scores each, in one order of samples.
        weights: by scorer, the same names; not normalised, single ones may be negative.
        missing: ``invalid`` as above; ``zero`` counts a missing score as 0, as VeRL-Omni does.
    Returns: rewards float64 [N], NaN where there is none, and bool [N], true where there is one.
    Raises: ConfigError for unusable weights; ContractError if names or lengths differ.
    Source: weighted sum as in the Flow-GRPO and VeRL-Omni code, except for missing scores.
    """
    check_weights(weights)
    lengths = {name: len(column) for name, column in scores.items()}
    if set(scores) != set(weights) or len(set(lengths.values())) != 1:
        raise ContractError(
            f"expected scores of {sorted(weights)}, equally many, got {lengths}; score every sample with every scorer"
        )
    columns = {name: _values(column, missing) for name, column in scores.items()}
    total_N = sum(weights[name] * columns[name] for name in sorted(columns))
    values_N = np.asarray(total_N, dtype=np.float64)
    return values_N, np.isfinite(values_N)


def extras(
    scores: Mapping[str, Score], weights: Mapping[str, float], *, missing: Missing = "invalid"
) -> dict[str, float | str]:
    """Return what one sample's scores say, under the names that metrics and tables use.

    Args:
        scores: by scorer, the sample's score.
        weights, missing: as for :func:`combine`.
    Returns: ``reward/<scorer>``, ``reward/<scorer>/<extra>`` and ``reward/combined``; a missing score, and then the
        combined one, is absent, or 0 if missing scores count as zero.
    """
    found: dict[str, float | str] = {}
    for name, score in scores.items():
        found.update({f"reward/{name}/{key}": value for key, value in score.extra.items()})
        value = _values([score], missing)[0]
        if np.isfinite(value):
            found[f"reward/{name}"] = float(value)
    values, valid = combine({name: [score] for name, score in scores.items()}, weights, missing=missing)
    if valid[0]:
        found["reward/combined"] = float(values[0])
    return found


def _values(column: Sequence[Score], missing: Missing) -> np.ndarray:
    absent = 0.0 if missing == "zero" else np.nan
    return np.array([absent if score.value is None else float(score.value) for score in column], dtype=np.float64)
