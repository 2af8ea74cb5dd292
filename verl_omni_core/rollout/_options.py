"""From a run's settings to what its engines are built from."""

from verl_omni_core.rollout._contract import EngineOptions
from verl_omni_core.settings.resolve import model_path
from verl_omni_core.settings.run import RunConfig


def engine_options(config: RunConfig) -> EngineOptions:
    """Return what a replica's engine is built from.

    Raises:
        ConfigError: there is no such pipeline folder.
    """
    rollout = config.rollout
    return EngineOptions(
        model=config.model.name,
        path=str(model_path(config)),
        dtype=rollout.dtype,
        max_batch=rollout.max_batch,
        batch_wait_ms=rollout.batch_wait_ms,
        threads=rollout.threads,
        tensor_parallel=rollout.tensor_parallel,
        lora_rank=config.model.lora.rank,
        deterministic=config.run.deterministic,
        start_timeout_s=rollout.start_timeout_s,
        request_timeout_s=rollout.request_timeout_s,
        options=rollout.options,
        model_options=config.model.options,
    )
