"""Scores as tables and back: a row a sample and scorer (``scores``, ``rewards``), or a sample (``reward_summary``)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from verl_omni_core.batches import columns
from verl_omni_core.batches.tables import build_table
from verl_omni_core.errors import ContractError
from verl_omni_core.rewards._combine import combine
from verl_omni_core.rewards._contract import Score
from verl_omni_core.settings.reward import RewardSettings

ByScorer = Mapping[str, Score]


def weights_of(settings: RewardSettings) -> dict[str, float]:
    """Return the weight of each scorer, by name."""
    return {scorer.name: scorer.weight for scorer in settings.scorers}


def score_table(
    schema_id: str,
    sample_index: Sequence[int],
    sample_ids: Sequence[str],
    scores: Sequence[ByScorer],
    settings: RewardSettings,
    versions: Mapping[str, str],
) -> pa.Table:
    """Build the long table: one row a sample and scorer, in order of samples, then of the settings' scorers.

    Args:
        schema_id: ``scores`` (streamed, a shard) or ``rewards`` (a step).
        sample_index, sample_ids: N samples.
        scores: N scores by scorer.
        settings: names, weights and what a missing score means.
        versions: of the scorers, by name.
    """
    rows = [
        (index, sample_id, entry, by_scorer[entry.name])
        for index, sample_id, by_scorer in zip(sample_index, sample_ids, scores, strict=True)
        for entry in settings.scorers
    ]
    return build_table(
        schema_id,
        {
            columns.SAMPLE_ID: [sample_id for _, sample_id, _, _ in rows],
            columns.SAMPLE_INDEX: [index for index, _, _, _ in rows],
            columns.REWARD_NAME: [entry.name for _, _, entry, _ in rows],
            columns.WEIGHT: [entry.weight for _, _, entry, _ in rows],
            columns.REQUIRED: [settings.failure == "fail"] * len(rows),
            columns.SCORE: [score.value for *_, score in rows],
            columns.STATUS: [score.status for *_, score in rows],
            columns.ERROR: [score.error for *_, score in rows],
            columns.ATTEMPTS: [score.attempts for *_, score in rows],
            columns.LATENCY_S: [score.latency_s for *_, score in rows],
            columns.SCORER_VERSION: [versions[entry.name] for _, _, entry, _ in rows],
            columns.EXTRA_JSON: [json.dumps(dict(score.extra), sort_keys=True) for *_, score in rows],
        },
    )


def scores_of(table: pa.Table) -> dict[str, dict[str, Score]]:
    """Return the scores of a long table, by sample id and scorer."""
    found: dict[str, dict[str, Score]] = {}
    for row in table.to_pylist():
        found.setdefault(row[columns.SAMPLE_ID], {})[row[columns.REWARD_NAME]] = Score(
            row[columns.SCORE],
            row[columns.ERROR],
            json.loads(row[columns.EXTRA_JSON] or "{}"),
            timed_out=row[columns.STATUS] == "timeout",
            attempts=row[columns.ATTEMPTS],
            latency_s=row[columns.LATENCY_S],
        )
    return found


def summary_table(samples: pa.Table, scores: Sequence[ByScorer], settings: RewardSettings) -> pa.Table:
    """Build the wide table: the combined reward of each sample, whether it has one, and numeric extras.

    Args:
        samples: N rows with the identity columns.
        scores: N scores by scorer, in the same order.
        settings: names and weights.
    Returns: ``reward_summary``: ``rm_score`` (missing where invalid), ``valid``, and a float column for each score
        ``reward/<scorer>`` and numeric extra ``reward/<scorer>/<extra>``. ``acc`` is that of the only scorer with one.
    """
    if samples.num_rows != len(scores):
        raise ContractError(f"got {len(scores)} scores for {samples.num_rows} samples; score each sample once")
    names = [scorer.name for scorer in settings.scorers]
    values, valid = combine({name: [row[name] for row in scores] for name in names}, weights_of(settings))
    table: dict[str, Any] = {name: samples.column(name) for name in columns.IDENTITY}
    table[columns.RM_SCORE] = _floats(values)
    table[columns.VALID] = valid
    accuracies = [name for name in names if any("acc" in row[name].extra for row in scores)]
    if len(accuracies) == 1:
        table["acc"] = _floats([row[accuracies[0]].extra.get("acc") for row in scores])
    for name in names:
        table[f"reward/{name}"] = _floats([row[name].value for row in scores])
        extras = [(key, value) for row in scores for key, value in row[name].extra.items()]
        for key in sorted({key for key, value in extras if not isinstance(value, str)}):
            table[f"reward/{name}/{key}"] = _floats([row[name].extra.get(key) for row in scores])
    return build_table("reward_summary", table)


def _floats(values: Sequence[Any] | np.ndarray) -> pa.Array:
    numbers = [None if value is None or isinstance(value, str) or not np.isfinite(value) else value for value in values]
    return pa.array(numbers, pa.float32())
