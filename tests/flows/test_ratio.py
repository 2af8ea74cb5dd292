"""The importance ratio through the whole chain: who draws, who recomputes, and what a wrong weight does."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from tests.flows import small
from tests.flows.conftest import Ran
from verl_omni_core.errors import ContractError, OffPolicyError
from verl_omni_core.online import train
from verl_omni_core.stages.opening import attach
from verl_omni_core.stages.session import RunRef
from verl_omni_core.stages.sync import load_into_replicas, probe
from verl_omni_core.weights.filesystem import read_update

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

DEVIATION = "actor/first_ratio_deviation"


@pytest.fixture(scope="module")
def still(store: Path) -> Iterator[Ran]:
    """A run that learns nothing: learning rate 0."""
    ran = Ran(small.settings("still", store, run__steps=1, training__learning_rate=0), "")
    try:
        ran.summary = train(ran.config)
        yield ran
    finally:
        ran.end()


def test_learning_rate_zero_reproduces_the_base_exactly(still: Ran) -> None:
    run = still.recorded
    assert run.checksum(1) == run.checksum(0)
    assert run.checksum(1, "sync-average") == run.checksum(0, "sync-average")
    assert run.pixels(1, "validate-samples").equal(run.pixels(0, "validate-samples"))
    assert (run.rewards(1, "validate") == run.rewards(0, "validate")).all()
    assert run.metrics(1)[DEVIATION] <= 1e-5


def _perturb(still: Ran) -> None:
    """Move one matrix of the replica's adapter by 1e-3."""
    manifest = still.recorded.manifest(1, "sync")
    folder = still.recorded.store.path_of(still.recorded.ref(1, "sync"), manifest.files[0].name).parent
    update = read_update(folder, 1)
    name = next(name for name in update.tensors if "lora_B" in name)
    tensors = {**update.tensors, name: update.tensors[name] + 1e-3}
    ray.get(still.actors().replicas[0].load_weights.remote(replace(update, tensors=tensors)), timeout=60)


def test_a_probe_refuses_a_replica_whose_weight_is_off_by_1e_3(still: Ran) -> None:
    session = attach(RunRef(str(still.root), 10**6))
    assert probe(session, 1) <= 1e-4
    _perturb(still)
    with pytest.raises(ContractError, match="probe sample of replica 0 is .* away from the trainer's own"):
        probe(session, 1)
    load_into_replicas(session, still.recorded.ref(1, "sync"))
    assert probe(session, 1) <= 1e-4


def test_a_replicas_weight_that_is_off_by_1e_3_stops_the_run_and_its_samples_are_drawn_again(still: Ran) -> None:
    settings = small.settings("still", still.root.parent, run__steps=2, training__learning_rate=0)

    with (
        small.before(2, "rollout", lambda: _perturb(still)),
        pytest.raises(OffPolicyError, match="max_ratio_deviation"),
    ):
        train(settings)
    for stage in ("rollout", "reward", "advantage", "update", "sync"):
        assert still.recorded.store.find(2, stage) is None, stage
    (wrong,) = (still.root / "steps" / "000002" / "rollout" / "attempts").iterdir()
    assert "max_ratio_deviation" in json.loads((wrong / "rejected.json").read_text())["reason"]
    train(settings)
    assert still.recorded.ref(2, "rollout").attempt != wrong.name
    assert still.recorded.metrics(2)[DEVIATION] <= 1e-5


def test_ratio_is_exactly_1_through_diffusers_where_the_pack_is_the_replay_batch(store: Path) -> None:
    settings = small.settings(
        "diffusers", store, run__steps=2, rollout__name="diffusers", run__images_every=0, run__validate_before="false"
    )
    ran = Ran(settings, "")
    try:
        train(settings)
        for step in (1, 2):
            assert ran.recorded.metrics(step)[DEVIATION] == 0.0
        assert ran.recorded.checksum(2) != ran.recorded.checksum(0)
        (engine,) = ran.recorded.manifest(2, "rollout").producer["engines"]
        assert engine["engine"] == "diffusers"
    finally:
        ran.end()
