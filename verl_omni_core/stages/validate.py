"""Draw and score the held-out prompts with fixed seeds and deterministic steps."""

import numpy as np
import pyarrow as pa

from verl_omni_core import identity
from verl_omni_core.batches import columns
from verl_omni_core.metrics.validation import validation_metrics
from verl_omni_core.stages.drawing import draw
from verl_omni_core.stages.keys import generation_inputs, stage_key
from verl_omni_core.stages.observe import observer, stage
from verl_omni_core.stages.plan import prompt_keys, prompt_table, request_table, validation_sampling
from verl_omni_core.stages.scoring import reward_tables
from verl_omni_core.stages.session import RunRef, Session, session_of
from verl_omni_core.stages.sync import AVERAGE, POLICY, load_into_replicas, weights_artifact
from verl_omni_core.store.manifest import ArtifactRef

STAGE = "validate"


@stage(STAGE)
def validate(run: RunRef, step: int) -> ArtifactRef:
    """Commit the held-out samples of the policy after ``step``, their rewards and the validation metrics.

    With ``training.ema_decay`` the moving average of the policy is judged, and afterwards the replicas hold the policy
    again. Every sample has a seed of its own, the same at every validation.
    """
    session = session_of(run)
    config = session.config
    network = POLICY if config.training.ema_decay is None else AVERAGE
    weights = weights_artifact(session, step, network)
    prompts, requests = held_out(session, session.validation_prompts.num_rows)
    key = stage_key(
        STAGE,
        step,
        [weights],
        generation=generation_inputs(config),
        reward=config.reward.model_dump(mode="json", include={"scorers"}),
        requests=requests.column(columns.SAMPLING_JSON)[0].as_py(),
        rows=requests.num_rows,
    )
    done = session.store.committed(step, STAGE, key)
    if done is None:
        done = _validate(session, step, key, weights, network, prompts, requests)
    metrics = read_metrics(session, done)
    observer().validated(step, metrics)
    return done


def held_out(session: Session, count: int) -> tuple[pa.Table, pa.Table]:
    """Return the prompts and requests tables of the first ``count`` held-out prompts."""
    validation = session.config.sampler.validation
    prompts = session.validation_prompts.slice(0, count)
    uids = [identity.group_uid(0, row, 0) for row in range(count)]
    requests = request_table(
        uids,
        prompt_keys(prompts),
        samples=validation.samples_per_prompt,
        seeds=[identity.sample_seed(validation.seed, 1, i) for i in range(count * validation.samples_per_prompt)],
        sampling=validation_sampling(session.config),
        validate=True,
        version=0,
    )
    return prompt_table(prompts, uids, [0] * count), requests


def read_metrics(session: Session, artifact: ArtifactRef) -> dict[str, float]:
    """Return the metrics that an artifact holds, by name."""
    table = session.store.table(artifact, "metrics")
    return dict(zip(table.column("name").to_pylist(), table.column("value").to_pylist(), strict=True))


def rewards_by_prompt(session: Session, artifact: ArtifactRef) -> np.ndarray:
    """Return the held-out rewards [prompts, samples]; NaN where a sample has none."""
    summary = session.store.table(artifact, "reward_summary")
    values = summary.column(columns.RM_SCORE).fill_null(float("nan")).to_numpy()
    return values.reshape(-1, session.config.sampler.validation.samples_per_prompt)


def _validate(
    session: Session,
    step: int,
    key: str,
    weights: ArtifactRef,
    network: str,
    prompts: pa.Table,
    requests: pa.Table,
) -> ArtifactRef:
    load_into_replicas(session, weights)
    attempt = session.store.attempt(step, STAGE, key, parents=[weights], weights_version=step)
    files = draw(session, attempt, prompts, requests)
    if network != POLICY:
        load_into_replicas(session, weights_artifact(session, step, POLICY))
    rewards, summary = reward_tables(session, attempt, prompts, files)
    values = summary.column(columns.RM_SCORE).fill_null(float("nan")).to_numpy()
    metrics = validation_metrics(values.reshape(len(prompts), -1), source="reward")
    files += [
        attempt.write_table("rewards", 0, rewards),
        attempt.write_table("reward_summary", 0, summary),
        attempt.write_table("metrics", 0, pa.table({"name": list(metrics), "value": list(metrics.values())})),
    ]
    return attempt.commit(
        files, rows=len(requests), parents=[weights], producer=session.producer(weights_version=step, network=network)
    )
