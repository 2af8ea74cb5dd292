"""What part of a GPU each rank and each engine gets."""

import pytest

from verl_omni_core.errors import ConfigError, EngineError
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.workers import actors
from verl_omni_core.workers.gpus import GpuShares, gpu_shares


@pytest.mark.parametrize(
    ("ranks", "replicas", "tensor_parallel", "total", "expected"),
    [
        (1, 1, 1, 0, GpuShares(0, 0)),
        (4, 4, 2, 0, GpuShares(0, 0)),
        (1, 1, 1, 1, GpuShares(0.5, 0.5)),
        (0, 1, 1, 1, GpuShares(1, 1)),
        (1, 1, 1, 2, GpuShares(1, 1)),
        (0, 1, 2, 2, GpuShares(1, 2)),
        (2, 2, 1, 4, GpuShares(1, 1)),
        (2, 1, 2, 4, GpuShares(1, 2)),
        (4, 2, 2, 8, GpuShares(1, 2)),
        (1, 1, 1, 8, GpuShares(1, 1)),
    ],
)
def test_each_rank_and_engine_has_its_own_gpus_and_one_pair_shares_the_only_one(
    ranks: int, replicas: int, tensor_parallel: int, total: int, expected: GpuShares
) -> None:
    found = gpu_shares(ranks=ranks, replicas=replicas, tensor_parallel=tensor_parallel, total=total)
    assert found == expected
    assert ranks * found.rank + replicas * found.replica <= total


@pytest.mark.parametrize(
    ("ranks", "replicas", "tensor_parallel", "total", "wanted"),
    [(2, 1, 1, 1, 3), (1, 2, 1, 1, 3), (1, 1, 2, 1, 3), (0, 1, 2, 1, 2), (2, 1, 1, 2, 3), (4, 3, 2, 8, 10)],
)
def test_a_layout_that_does_not_fit_is_refused_with_both_numbers(
    ranks: int, replicas: int, tensor_parallel: int, total: int, wanted: int
) -> None:
    with pytest.raises(ConfigError, match=f"need {wanted} GPUs, the cluster has {total};") as refused:
        gpu_shares(ranks=ranks, replicas=replicas, tensor_parallel=tensor_parallel, total=total)
    assert ("training.ranks" in str(refused.value)) == (ranks > 0)


def test_gpus_that_others_hold_are_missed_at_once_and_their_holders_named(monkeypatch: pytest.MonkeyPatch) -> None:
    living = [
        {"namespace": "verl-omni-other", "name": "trainer-0"},
        {"namespace": "verl-omni-mine", "name": "trainer-0"},
    ]
    monkeypatch.setattr(actors, "list_named_actors", lambda all_namespaces: living)
    monkeypatch.setattr(actors.ray, "available_resources", lambda: {"GPU": 0.25})
    monkeypatch.setattr(actors, "_FREE_GPU_S", 0.0)
    shares = GpuShares(0.5, 0.5)
    with pytest.raises(EngineError, match="need 0.5 GPUs, 0.25 are free; actors live in verl-omni-other: end"):
        actors._wait_for_gpus(RunConfig(), "verl-omni-mine", shares, trains=True)
    living.append({"namespace": "verl-omni-mine", "name": "replica-0"})
    actors._wait_for_gpus(RunConfig(), "verl-omni-mine", shares, trains=True)
