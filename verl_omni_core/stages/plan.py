"""Plan a step: which prompts, which groups, which seeds. Pure bookkeeping, so any retry plans the same."""

import json

import pyarrow as pa

from verl_omni_core import identity
from verl_omni_core.batches import columns
from verl_omni_core.data.prompt_sampler import rows_of_step
from verl_omni_core.samplers._window import window_of_step
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.keys import stage_key
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
        "prompts": len(session.train_prompts),
        "seed": config.run.seed,
        "group_size": config.rollout.group_size,
        "sampler": config.sampler.model_dump(mode="json", exclude={"validation"}),
    }
    key = stage_key(STAGE, step, [], **inputs)
    done = session.store.committed(step, STAGE, key)
    if done is not None:
        return done
    rows = rows_of_step(
        len(session.train_prompts),
        step=step,
        prompts_per_step=config.data.prompts_per_step,
        seed=config.run.seed,
        shuffle=config.data.shuffle,
    )
    uids = [identity.group_uid(step, row.index, row.occurrence) for row in rows]
    drawn = session.train_prompts.take([row.index for row in rows])
    requests = request_table(
        uids,
        prompt_keys(drawn),
        samples=config.rollout.group_size,
        seeds=[identity.sample_seed(config.run.seed, step, i) for i in range(len(rows) * config.rollout.group_size)],
        sampling=training_sampling(config, step),
        validate=False,
    )
    attempt = session.store.attempt(step, STAGE, key)
    files = [
        attempt.write_table("prompts", 0, prompt_table(drawn, uids, [row.epoch for row in rows])),
        attempt.write_table("requests", 0, requests),
    ]
    return attempt.commit(files, rows=len(requests), parents=[], producer=session.producer())


def training_sampling(config: RunConfig, step: int) -> dict[str, object]:
    """Return the sampling parameters of a training step: stochastic in one window that all samples share."""
    sampler = config.sampler
    window = window_of_step(
        config.run.seed,
        step,
        num_inference_steps=sampler.num_inference_steps,
        size=sampler.sde_window_size,
        range=sampler.sde_window_range,
        strategy=sampler.window,
    )
    return {**_common_sampling(config), "window": list(window), "noise_level": sampler.noise_level, "logprobs": True}


def validation_sampling(config: RunConfig) -> dict[str, object]:
    """Return the sampling parameters of validation: deterministic steps."""
    validation = config.sampler.validation
    scale = validation.guidance_scale
    return {
        **_common_sampling(config),
        "num_inference_steps": validation.num_inference_steps,
        "guidance_scale": config.sampler.guidance_scale if scale is None else scale,
        "window": None,
        "noise_level": 0.0,
        "logprobs": False,
    }


def prompt_keys(prompts: pa.Table) -> list[str]:
    """Return for each row the digest of everything that the engine consumes of a prompt."""
    negatives = prompts.column(columns.NEGATIVE_PROMPT).to_pylist()
    return [
        identity.digest({"prompt": prompt, "negative": negative})[:32]
        for prompt, negative in zip(prompts.column(columns.PROMPT).to_pylist(), negatives, strict=True)
    ]


def request_table(
    uids: list[str], keys: list[str], *, samples: int, seeds: list[int], sampling: dict[str, object], validate: bool
) -> pa.Table:
    """Return one row a sample, prompt-major: the order in which every later table stands."""
    count = len(uids) * samples
    return pa.table(
        {
            columns.SAMPLE_INDEX: pa.array(range(count), pa.int64()),
            columns.SAMPLE_ID: [identity.sample_id(uid, g) for uid in uids for g in range(samples)],
            columns.UID: [uid for uid in uids for _ in range(samples)],
            columns.SESSION: pa.array([g for _ in uids for g in range(samples)], pa.int32()),
            columns.PROMPT_KEY: [key for key in keys for _ in range(samples)],
            columns.SEED: pa.array(seeds, pa.int64()),
            columns.SAMPLING_JSON: [json.dumps(sampling, sort_keys=True)] * count,
            columns.VALIDATE: pa.array([validate] * count, pa.bool_()),
        }
    )


def prompt_table(prompts: pa.Table, uids: list[str], epochs: list[int]) -> pa.Table:
    """Return the prompts of a step, one row a group."""
    return (
        prompts.append_column(columns.UID, pa.array(uids))
        .append_column(columns.PROMPT_KEY, pa.array(prompt_keys(prompts)))
        .append_column(columns.EPOCH, pa.array(epochs, pa.int32()))
    )


def _common_sampling(config: RunConfig) -> dict[str, object]:
    sampler = config.sampler
    return {
        "height": sampler.height,
        "width": sampler.width,
        "num_inference_steps": sampler.num_inference_steps,
        "sampler": sampler.name,
        "sampler_options": sampler.options,
        "grid": sampler.grid,
        "guidance_scale": sampler.guidance_scale,
        "max_sequence_length": sampler.max_sequence_length,
    }
