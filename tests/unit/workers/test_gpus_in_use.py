"""How many GPUs a run uses: what its throughput is divided by."""

import pytest

from verl_omni_core.settings.run import RunConfig
from verl_omni_core.workers.actors import Actors


@pytest.mark.parametrize(
    ("there", "trains", "used"), [(0, True, 0), (8, True, 4), (4, True, 4), (1, True, 1), (8, False, 2)]
)
def test_those_of_ranks_and_engines_count_up_to_what_there_is(monkeypatch, there, trains, used):
    config = RunConfig.model_validate({"training": {"ranks": 2}, "rollout": {"replicas": 1, "tensor_parallel": 2}})
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0, "GPU": float(there)} if there else {"CPU": 2.0})
    group = object() if trains else None
    run = Actors(config, "run", group, replicas=[], rollout_workers=[], reward_workers=[])
    assert run.gpus() == used
