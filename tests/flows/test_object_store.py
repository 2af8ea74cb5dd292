"""A run whose store is a bucket: trained, resumed and exported where nothing of it lies on the disk."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import object_store
from tests.flows import small
from tests.flows.recorded import Recorded
from verl_omni_core.online import train
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.ending import end_run
from verl_omni_core.stages.export import export
from verl_omni_core.store.ledger import Ledger
from verl_omni_core.store.places import folder_of
from verl_omni_core.store.runs import list_runs

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture
def uri(home: Path) -> Iterator[str]:
    with object_store.server() as endpoint:
        address = object_store.address(endpoint, "runs")
        yield address
        for run in list_runs(address):
            end_run(run.run_id, address)


def quick(store: str | Path, steps: int) -> RunConfig:
    changes = {"rollout__name": "diffusers", "run__validate_before": "false", "run__images_every": 0}
    return small.settings("a", store, **changes, run__steps=steps, data__max_validation_prompts=2)


def test_a_run_whose_copies_are_deleted_goes_on_from_its_bucket_and_trains_the_same_bits(
    uri: str, tmp_path: Path
) -> None:
    near = tmp_path / "runs"
    train(quick(near, 3))
    end_run("a", near)

    train(quick(uri, 2))
    end_run("a", uri)
    shutil.rmtree(folder_of(uri))
    (listed,) = list_runs(uri)
    assert (listed.run_id, listed.status, listed.steps_done) == ("a", "finished", 2)
    train(quick(uri, 3))
    end_run("a", uri)
    shutil.rmtree(folder_of(uri))

    done = [export("a", tmp_path / f"exported-{number}", store=store) for number, store in enumerate((near, uri))]
    one, other = (Path(each.folder, "adapter_model.safetensors").read_bytes() for each in done)
    assert one == other
    here, there = Recorded(near / "a"), Recorded(folder_of(uri) / "a")
    assert [there.checksum(step) for step in (1, 2, 3)] == [here.checksum(step) for step in (1, 2, 3)]
    assert [there.ref(step, "rollout").attempt[:6] for step in (1, 2, 3)] == ["000001", "000001", "000002"]
    records = Ledger(there.root).records()
    assert [record["step"] for record in records] == [record["step"] for record in Ledger(here.root).records()]
    assert {"report.html", "summary.txt", "engine.json"} <= {path.name for path in there.root.iterdir()}
