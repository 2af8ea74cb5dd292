"""How many GPUs, or what part of one, each rank and each engine gets."""

from dataclasses import dataclass

from verl_omni_core.errors import ConfigError


@dataclass(frozen=True)
class GpuShares:
    """GPUs of one actor of each kind."""

    rank: float
    replica: float


def gpu_shares(*, ranks: int, replicas: int, tensor_parallel: int, total: int) -> GpuShares:
    """Give each rank and each engine GPUs of its own; one rank and one engine of one GPU may share the only one.

    Args:
        ranks: of the trainer; 0 where nothing is trained.
        replicas: engines.
        tensor_parallel: GPUs that an engine spans.
        total: GPUs of the cluster; with 0 everything runs on CPUs.

    Raises:
        ConfigError: there are too few. Shares of a GPU are placed one by one, so several ranks could meet on one, and
            an engine that spans devices could get parts of a single one.
    """
    wanted = ranks + replicas * tensor_parallel
    if not total:
        return GpuShares(0, 0)
    if total >= wanted:
        return GpuShares(1, tensor_parallel)
    if (ranks, replicas, tensor_parallel) == (1, 1, 1):
        return GpuShares(0.5, 0.5)
    trainer = f"training.ranks = {ranks} and " if ranks else ""
    raise ConfigError(
        f"{trainer}rollout.replicas = {replicas} with rollout.tensor_parallel = {tensor_parallel} need {wanted} GPUs, "
        f"the cluster has {total}; lower one of them or use a larger cluster (one rank and one replica may share one "
        "GPU)"
    )
