"""Draw and score the held-out prompts with fixed seeds and deterministic steps."""

import numpy as np
import pyarrow as pa

from verl_omni_core import identity
from verl_omni_core.agent_loop.sampling import validation_sampling
from verl_omni_core.batches import columns
from verl_omni_core.metrics.validation import validation_metrics
from verl_omni_core.stages.drawing import draw
from verl_omni_core.stages.keys import generation_inputs, stage_key
from verl_omni_core.stages.metric_table import metric_table, metrics_of
from verl_omni_core.stages.observe import observer, stage
from verl_omni_core.stages.plan import prompt_table, request_table
from verl_omni_core.stages.reward import score_samples
from verl_omni_core.stages.schedule import policy_version
from verl_omni_core.stages.session import RunRef, Session, session_of
from verl_omni_core.stages.sync import AVERAGE, POLICY, load_into_replicas, weights_artifact
from verl_omni_core.store.manifest import ArtifactRef

STAGE = "validate"
SAMPLES = "validate-samples"
ACC = "acc"
NO_SOURCE = "unknown"
"""Name of the data source, in metrics, of prompts that name none."""


@stage(STAGE)
def validate(run: RunRef, step: int) -> ArtifactRef:
    """Commit the held-out samples of the policy after ``step``, their rewards and the validation metrics.

    With ``training.ema_decay`` the moving average of the policy is judged, and afterwards the replicas hold the policy
    that draws the next step. Every sample has a seed of its own, the same at every validation.
    """
    session = session_of(run)
    prompts, requests = held_out(session, session.validation_prompts.num_rows, version=step)
    return score_held_out(session, step, draw_judged(session, SAMPLES, step, prompts, requests), prompts)


def score_held_out(session: Session, step: int, samples: ArtifactRef, prompts: pa.Table) -> ArtifactRef:
    """Commit rewards and metrics of held-out samples, and show the metrics."""
    scorers = session.config.reward.model_dump(mode="json", include={"scorers"})
    key = stage_key(STAGE, step, [samples], scorers=scorers, versions=session.actors.scorer_versions())
    done = session.store.committed(step, STAGE, key)
    if done is None:
        done = _score(session, step, key, samples, prompts)
    metrics = metrics_of(session.store.table(done, "metrics"))
    session.tracker.scalars(step, metrics)  # committed ones as well: a process may end between the two
    observer().validated(step, metrics)
    return done


def draw_judged(session: Session, name: str, step: int, prompts: pa.Table, requests: pa.Table) -> ArtifactRef:
    """Commit samples of the network that validation judges, under the stage ``name``."""
    judged = weights_artifact(session, step, POLICY if session.config.training.ema_decay is None else AVERAGE)
    sampling = weights_artifact(session, policy_version(step + 1, session.config.weights.sync_interval), POLICY)
    return draw_with(session, name, step, judged, prompts, requests, afterwards=sampling)


def draw_with(
    session: Session,
    name: str,
    step: int,
    weights: ArtifactRef | None,
    prompts: pa.Table,
    requests: pa.Table,
    *,
    afterwards: ArtifactRef | None = None,
) -> ArtifactRef:
    """Commit samples drawn with committed weights, under the stage ``name``.

    Args:
        weights: loaded before; none: what the replicas hold.
        afterwards: weights that the replicas hold after it; none: the same.
    """
    parents = [] if weights is None else [weights]
    key = stage_key(
        name,
        step,
        parents,
        generation=generation_inputs(session.config),
        sampling=requests.column(columns.SAMPLING_JSON)[0].as_py(),
        seeds=requests.column(columns.SEED).to_pylist(),
        prompts=prompts.column(columns.PROMPT_KEY).to_pylist(),
    )
    done = session.store.committed(step, name, key)
    if done is not None:
        return done
    attempt = session.store.attempt(step, name, key, parents=parents, weights_version=step)
    if weights is not None:
        load_into_replicas(session, weights)
    files = draw(session, attempt, prompts, requests, version=step, validate=True).files
    if afterwards is not None and afterwards != weights:
        load_into_replicas(session, afterwards)  # before the commit: a stage that is done is not entered again
    files.append(attempt.write_table("prompts", 0, prompts))
    producer = session.producer(
        weights_version=step,
        weights=None if weights is None else weights.stage,
        engines=session.actors.describe_engines(),
    )
    return attempt.commit(files, rows=len(requests), parents=parents, producer=producer)


def held_out(session: Session, count: int, *, version: int) -> tuple[pa.Table, pa.Table]:
    """Return the prompts and requests tables of the first ``count`` held-out prompts, for a policy version."""
    config, samples = session.config, session.config.sampler.validation.samples_per_prompt
    rows = session.validation_prompts.slice(0, count)
    uids = [identity.group_uid(0, row, 0) for row in range(len(rows))]
    prompts = prompt_table(config, rows, uids, [0] * len(rows), dataset=config.data.validation)
    seeds = [identity.sample_seed(config.sampler.validation.seed, 1, i) for i in range(len(rows) * samples)]
    requests = request_table(
        prompts, samples=samples, seeds=seeds, sampling=validation_sampling(config), validate=True, version=version
    )
    return prompts, requests


def rewards_by_prompt(session: Session, artifact: ArtifactRef) -> np.ndarray:
    """Return the held-out rewards [prompts, samples]; NaN where a sample has none."""
    return _by_prompt(session, session.store.table(artifact, "reward_summary"), columns.RM_SCORE)


def variables(session: Session, summary: pa.Table) -> dict[str, np.ndarray]:
    """Return what validation has statistics of, each [prompts, samples]; NaN where a sample has no value.

    Args:
        summary: a ``reward_summary`` table of held-out samples.
    Returns: ``reward``; ``acc`` where a scorer says it; ``reward/<scorer>`` of each scorer.
    """
    scorers = [f"reward/{scorer.name}" for scorer in session.config.reward.scorers]
    named = {"reward": columns.RM_SCORE} | {name: name for name in (ACC, *scorers) if name in summary.column_names}
    return {name: _by_prompt(session, summary, column) for name, column in named.items()}


def _by_prompt(session: Session, summary: pa.Table, column: str) -> np.ndarray:
    values = summary.column(column).fill_null(float("nan")).to_numpy()
    return values.reshape(-1, session.config.sampler.validation.samples_per_prompt)


def _score(session: Session, step: int, key: str, samples: ArtifactRef, prompts: pa.Table) -> ArtifactRef:
    attempt = session.store.attempt(step, STAGE, key, parents=[samples], weights_version=step)
    rewards, summary = score_samples(session, samples, prompts)
    sources = [source or NO_SOURCE for source in prompts.column(columns.DATA_SOURCE).to_pylist()]
    metrics = validation_metrics(variables(session, summary), sources)
    files = [
        attempt.write_table("rewards", 0, rewards),
        attempt.write_table("reward_summary", 0, summary),
        attempt.write_table("metrics", 0, metric_table(step, metrics)),
    ]
    return attempt.commit(files, rows=len(summary), parents=[samples], producer=session.producer(weights_version=step))
