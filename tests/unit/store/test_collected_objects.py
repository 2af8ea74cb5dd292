"""Retention of a run in an object store: what goes goes from the store, whichever machine lets it go."""

from pathlib import Path

import pyarrow as pa
import pytest

from tests.object_store import machine
from verl_omni_core.errors import StoreError
from verl_omni_core.store import runs
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.attempt import attempt_folder
from verl_omni_core.store.collected import collect, collected_files, present_files
from verl_omni_core.store.lease import take_ownership
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.store.places import remote_of

CONFIG = {"run": {"id": "r", "steps": 3}}


@pytest.fixture
def roots(uri, tmp_path) -> tuple[Path, Path]:
    """The run's folders on two machines."""
    a = runs.create_run(machine(tmp_path / "a", uri), CONFIG, code_version="1", run_id="r").root
    return a, runs.open_run(machine(tmp_path / "b", uri), "r").root


def commit(store: RunStore) -> ArtifactRef:
    attempt = store.attempt(1, "rollout", "k")
    files = [attempt.write_table(name, 0, pa.table({"x": [1.0]})) for name in ("trajectories", "media")]
    return attempt.commit(files, rows=1, parents=[], producer={})


def let_go(root: Path, ref: ArtifactRef, table: str, epoch: int) -> int:
    store = RunStore(root, epoch=epoch)
    files = [file for file in store.manifest(ref).files if file.table == table]
    return collect(attempt_folder(root, ref), files, setting="durability.retention.x", value=1, epoch=epoch)


def data_objects(root: Path) -> list[str]:
    return [name for name in remote_of(root).files() if name.endswith(".arrow")]


def test_what_one_machine_lets_go_is_gone_for_the_other(roots):
    a, b = roots
    with take_ownership(a, "flow") as own:
        ref = commit(RunStore(a, epoch=own.epoch))
        reader = RunStore(b)
        assert reader.table(ref, "trajectories").num_rows == reader.table(ref, "media").num_rows == 1
        assert let_go(a, ref, "trajectories", own.epoch) > 0
        with pytest.raises(StoreError, match="deleted by retention"):
            reader.table(ref, "trajectories")  # though this machine still has a copy
        assert reader.table(ref, "media").num_rows == 1
        reader.verify(ref)
    assert len(data_objects(a)) == 1


def test_an_owner_without_copies_knows_what_went_and_deletes_objects(roots):
    a, b = roots
    with take_ownership(a, "flow a") as own:
        ref = commit(RunStore(a, epoch=own.epoch))
        let_go(a, ref, "trajectories", own.epoch)
    with take_ownership(b, "flow b") as own:
        store = RunStore(b, epoch=own.epoch)
        folder = attempt_folder(b, ref)
        assert [file.table for file in present_files(folder, store.manifest(ref).files)] == ["media"]
        assert set(collected_files(folder)) == {"trajectories-00000.arrow"}
        assert let_go(b, ref, "media", own.epoch) > 0
        assert let_go(b, ref, "media", own.epoch) == 0
        assert data_objects(b) == []
        for table in ("trajectories", "media"):
            with pytest.raises(StoreError, match="deleted by retention"):
                store.table(ref, table)
