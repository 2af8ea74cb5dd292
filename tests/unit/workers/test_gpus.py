"""How many GPUs a run uses: what its throughput is divided by."""

import pytest

from verl_omni_core.settings.run import RunConfig
from verl_omni_core.workers import actors


@pytest.mark.parametrize(
    ("there", "trains", "used", "rank_share"),
    [(0, True, 0, 0), (8, True, 4, 1), (4, True, 4, 1), (3, True, 3, 0.4), (8, False, 2, 1)],
)
def test_ranks_and_engines_have_their_own_gpus_where_there_are_enough_and_else_share_them(
    monkeypatch, there, trains, used, rank_share
):
    config = RunConfig.model_validate({"training": {"ranks": 2}, "rollout": {"replicas": 1, "tensor_parallel": 2}})
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0, "GPU": float(there)} if there else {"CPU": 2.0})
    group = object() if trains else None
    run = actors.Actors(config, "run", group, replicas=[], rollout_workers=[], reward_workers=[])
    assert run.gpus() == used
    assert actors._gpu_shares(config, trains).rank == rank_share
