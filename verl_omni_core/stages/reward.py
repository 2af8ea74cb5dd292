"""Score a step's samples: collect what was scored while sampling, score the rest, combine."""

import json

import pyarrow as pa

from verl_omni_core.batches import columns
from verl_omni_core.batches.tables import read_tensor
from verl_omni_core.errors import NumericError, ScorerError
from verl_omni_core.rewards._contract import Score, ScoringItem
from verl_omni_core.rewards._tables import score_table, scores_of, summary_table
from verl_omni_core.stages import incomplete_groups
from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.metric_table import metric_table
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.session import RunRef, Session, session_of
from verl_omni_core.store.manifest import ArtifactRef

STAGE = "reward"


@stage(STAGE)
def reward(run: RunRef, step: int, planned: ArtifactRef, samples: ArtifactRef) -> ArtifactRef:
    """Commit the ``rewards`` table, a row a sample and scorer, the ``reward_summary``, a row a sample, and metrics.

    Samples that could not be drawn have no row. The summary says of the others which count, and why not: by
    ``rollout.failure``, as it was when they were drawn, and by ``reward.failure``.

    Args:
        planned: the plan's artifact: prompts and ground truths.
        samples: the rollout's artifact.

    Raises:
        ScorerError: a score is missing and ``reward.failure`` is ``fail``. NumericError: too many are missing, or no
            sample is left.
    """
    session = session_of(run)
    key = stage_key(
        STAGE,
        step,
        [planned, samples],
        scorers=session.config.reward.model_dump(mode="json", include={"scorers"}),
        versions=session.actors.scorer_versions(),
    )
    done = session.store.committed(step, STAGE, key)
    if done is not None:
        return done
    attempt = session.store.attempt(step, STAGE, key, parents=[planned, samples])
    rewards, summary = score_samples(session, samples, session.store.table(planned, "prompts"))
    summary, metrics = _without_incomplete_groups(session, samples, summary)
    files = [
        attempt.write_table("rewards", 0, rewards),
        attempt.write_table("reward_summary", 0, summary),
        attempt.write_table("metrics", 0, metric_table(step, metrics)),
    ]
    return attempt.commit(files, rows=len(summary), parents=[planned, samples], producer=session.producer())


def score_samples(session: Session, samples: ArtifactRef, prompts: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Return the long and the wide reward table of committed samples, in canonical order.

    A score that could not be had while sampling is tried once more: reward workers may have been lost then.

    Args:
        samples: an artifact with ``media`` and, where samples were scored as they came, ``scores``.
        prompts: the prompts of the samples, by ``uid``.
    """
    media = session.store.table(samples, "media")
    named = {file.table for file in session.store.manifest(samples).files}
    found = scores_of(session.store.table(samples, "scores")) if "scores" in named else {}
    ids = media.column(columns.SAMPLE_ID).to_pylist()
    missing = [row for row, sample_id in enumerate(ids) if _lacks(session, found.get(sample_id))]
    if missing:
        items = _items(media, prompts, missing)
        for item, scores in zip(items, session.actors.score(items), strict=True):
            had = {name: score for name, score in found.get(item.sample_id, {}).items() if score.value is not None}
            found[item.sample_id] = {**scores, **had}
    ordered = [found[sample_id] for sample_id in ids]
    settings = session.config.reward
    _check(session, ids, ordered)
    table = score_table(
        "rewards",
        media.column(columns.SAMPLE_INDEX).to_pylist(),
        ids,
        ordered,
        settings,
        session.actors.scorer_versions(),
    )
    return table, summary_table(media, ordered, settings)


def _without_incomplete_groups(
    session: Session, samples: ArtifactRef, summary: pa.Table
) -> tuple[pa.Table, dict[str, float]]:
    manifest = session.store.manifest(samples)
    has_failed = any(file.table == "trajectories_failed" for file in manifest.files)
    failed = session.store.table(samples, "trajectories_failed") if has_failed else None
    lost = incomplete_groups.lost_by_group(failed, summary[columns.SAMPLE_INDEX].to_pylist())
    left_out = incomplete_groups.reasons(
        summary[columns.UID].to_pylist(),
        summary[columns.VALID].to_pylist(),
        lost,
        rollout=manifest.producer.get(incomplete_groups.POLICY),
        reward=session.config.reward.failure,
        least=2 if getattr(session.algorithm, "COMPARES_GROUP", True) else 1,
    )
    summary = incomplete_groups.with_status(summary, left_out)
    return summary, incomplete_groups.failure_metrics(summary, lost)


def _lacks(session: Session, scores: dict[str, Score] | None) -> bool:
    return scores is None or any(
        scorer.name not in scores or scores[scorer.name].value is None for scorer in session.config.reward.scorers
    )


def _items(media: pa.Table, prompts: pa.Table, rows: list[int]) -> list[ScoringItem]:
    chosen = media.take(rows)
    pixels = read_tensor(chosen, columns.PIXELS).numpy()
    by_uid = {row[columns.UID]: row for row in prompts.to_pylist()}
    ids = chosen.column(columns.SAMPLE_ID).to_pylist()
    own = [by_uid[uid] for uid in chosen.column(columns.UID).to_pylist()]
    return [
        ScoringItem(
            sample_id=sample_id,
            image=image,
            prompt=prompt[columns.PROMPT],
            ground_truth=prompt.get(columns.GROUND_TRUTH),
            data_source=prompt.get(columns.DATA_SOURCE),
            extra_info=json.loads(prompt.get(columns.EXTRA_INFO_JSON) or "{}"),
        )
        for sample_id, image, prompt in zip(ids, pixels, own, strict=True)
    ]


def _check(session: Session, ids: list[str], scores: list[dict[str, Score]]) -> None:
    reasons = [
        f"{sample_id}: {name}: {score.error}"
        for sample_id, by_scorer in zip(ids, scores, strict=True)
        for name, score in by_scorer.items()
        if score.value is None
    ]
    settings = session.config.reward
    if reasons and settings.failure == "fail":
        raise ScorerError(f"{len(reasons)} scores are missing and reward.failure is 'fail'; the first: {reasons[0]}")
    share = sum(any(score.value is None for score in row.values()) for row in scores) / max(len(scores), 1)
    if share > settings.max_invalid_fraction:
        raise NumericError(
            f"{share:.0%} of the samples have no score, reward.max_invalid_fraction allows "
            f"{settings.max_invalid_fraction:.0%}; the first reason: {reasons[0]}"
        )
