"""Plan a step: which prompts, which groups, which seeds. Pure bookkeeping, so any retry plans the same."""

import dataclasses
import json

import pyarrow as pa

from verl_omni_core import identity
from verl_omni_core.agent_loop.sampling import training_sampling
from verl_omni_core.batches import columns
from verl_omni_core.batches.schema import SCHEMAS
from verl_omni_core.batches.tables import build_table
from verl_omni_core.data.prompt_sampler import rows_of_step
from verl_omni_core.rollout._contract import SamplingParams
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.schedule import policy_version
from verl_omni_core.stages.session import RunRef, session_of
from verl_omni_core.store.manifest import ArtifactRef

STAGE = "plan"


@stage(STAGE)
def plan(run: RunRef, step: int) -> ArtifactRef:
    """Commit the ``prompts`` and ``requests`` tables of a step.

    Args:
        run: the run.
        step: 1-based.
    """
    session = session_of(run)
    config = session.config
    inputs = {
        "data": config.data.model_dump(mode="json", include={"train", "prompts_per_step", "shuffle", "overlong"}),
        "prompts": session.train_prompts_digest,
        "seed": config.run.seed,
        "group_size": config.rollout.group_size,
        "sampler": config.sampler.model_dump(mode="json", exclude={"validation"}),
    }
    key = stage_key(STAGE, step, [], **inputs)
    done = session.store.committed(step, STAGE, key)
    if done is not None:
        return done
    draws = rows_of_step(
        config.run.seed,
        step,
        dataset_rows=len(session.train_prompts),
        prompts_per_step=config.data.prompts_per_step,
        shuffle=config.data.shuffle,
    )
    uids = [identity.group_uid(step, draw.dataset_row, draw.occurrence) for draw in draws]
    drawn = session.train_prompts.take([draw.dataset_row for draw in draws])
    prompts = prompt_table(config, drawn, uids, [draw.epoch for draw in draws], dataset=config.data.train)
    requests = request_table(
        prompts,
        samples=config.rollout.group_size,
        seeds=[identity.sample_seed(config.run.seed, step, i) for i in range(len(draws) * config.rollout.group_size)],
        sampling=training_sampling(config, step),
        validate=False,
        version=policy_version(step, config.weights.sync_interval),
    )
    attempt = session.store.attempt(step, STAGE, key)
    files = [attempt.write_table("prompts", 0, prompts), attempt.write_table("requests", 0, requests)]
    return attempt.commit(files, rows=len(requests), parents=[], producer=session.producer())


def prompt_table(config: RunConfig, rows: pa.Table, uids: list[str], epochs: list[int], *, dataset: str) -> pa.Table:
    """Return the ``prompts`` table of rows of a data set, one row a group.

    Args:
        rows: as :func:`verl_omni_core.data.prompts.read_prompts` returns them.
        uids, epochs: of the groups.
        dataset: where the rows come from, as the settings name it.
    """
    known = {column.name for column in SCHEMAS["prompts"].columns}
    given = {name: rows.column(name) for name in rows.column_names if name in known}
    prompts = rows.column(columns.PROMPT).to_pylist()
    negatives = _optional(rows, columns.NEGATIVE_PROMPT)
    agents = _optional(rows, columns.AGENT_NAME)
    return build_table(
        "prompts",
        {
            **given,
            columns.UID: uids,
            columns.EPOCH: epochs,
            columns.DATASET: [dataset] * len(uids),
            columns.PROMPT_KEY: [
                identity.digest({"prompt": prompt, "negative": negative})[:32]
                for prompt, negative in zip(prompts, negatives, strict=True)
            ],
            columns.AGENT_NAME: [agent or config.rollout.agent_loop for agent in agents],
        },
    )


def request_table(
    prompts: pa.Table, *, samples: int, seeds: list[int], sampling: SamplingParams, validate: bool, version: int
) -> pa.Table:
    """Return the ``requests`` table, one row a sample, prompt-major: the order in which every later table stands.

    Args:
        prompts: a ``prompts`` table.
        samples: samples of each prompt. seeds: one a sample.
        sampling: parameters of all of them.
        version: the policy version that is to draw them.
    """
    uids, keys = prompts.column(columns.UID).to_pylist(), prompts.column(columns.PROMPT_KEY).to_pylist()
    count = len(uids) * samples
    return build_table(
        "requests",
        {
            columns.SAMPLE_INDEX: list(range(count)),
            columns.SAMPLE_ID: [identity.sample_id(uid, g) for uid in uids for g in range(samples)],
            columns.UID: [uid for uid in uids for _ in range(samples)],
            columns.SESSION: [g for _ in uids for g in range(samples)],
            columns.PROMPT_KEY: [key for key in keys for _ in range(samples)],
            columns.SEED: seeds,
            columns.SAMPLING_JSON: [json.dumps(dataclasses.asdict(sampling), sort_keys=True)] * count,
            columns.VALIDATE: [validate] * count,
            columns.WANTED_VERSION: [version] * count,
            columns.PRIORITY: list(range(count)),
        },
    )


def _optional(rows: pa.Table, name: str) -> list[str | None]:
    return rows.column(name).to_pylist() if name in rows.column_names else [None] * len(rows)
