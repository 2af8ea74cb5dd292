"""What replicas say after loading is held against what the trainer wrote."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from verl_omni_core.errors import ContractError
from verl_omni_core.rollout._contract import LoadedWeights, WeightUpdate
from verl_omni_core.stages.session import RunRef, Session
from verl_omni_core.stages.sync import load_into_replicas
from verl_omni_core.stages.trained import config_of
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.store.runs import open_run
from verl_omni_core.weights.checksum import checksum


@dataclass
class Replicas:
    """Actors that answer what they are told to."""

    answers: list[LoadedWeights]

    def load_weights(self, folder: str, version: int) -> list[LoadedWeights]:
        return self.answers


def _loading(store: Path, run_id: str, step: int, answers: list[LoadedWeights]) -> tuple[Session, ArtifactRef]:
    folder = open_run(store, run_id)
    artifacts = RunStore(folder.root)
    session = Session(RunRef(str(folder.root), 1), config_of(folder), artifacts, Replicas(answers))
    ref = artifacts.find(step, "sync")
    assert ref is not None
    return session, ref


@pytest.mark.parametrize(("run_id", "step", "name"), [("adapters", 2, "policy"), ("full", 3, "full")])
def test_replicas_must_hold_the_version_in_as_many_modules_and_with_the_same_numbers(
    store: Path, weights: dict[str, WeightUpdate], run_id: str, step: int, name: str
) -> None:
    tensors = weights[name].tensors
    pairs = sum("lora_A" in tensor for tensor in tensors)
    count = pairs if name == "policy" else len(tensors)
    assert count > 2
    good = LoadedWeights(step, count, checksum(tensors))
    load_into_replicas(*_loading(store, run_id, step, [good, good]))
    for wrong in (
        replace(good, bound_modules=count - 1),
        replace(good, bound_modules=0),
        replace(good, bound_modules=count + 1),
        replace(good, version=step - 1),
        replace(good, checksum="0" * 8),
    ):
        with pytest.raises(ContractError, match=rf"replica 1 holds version {wrong.version} in {wrong.bound_modules} "):
            load_into_replicas(*_loading(store, run_id, step, [good, wrong]))
