"""Runs in an object store: two folders of copies are two machines, and the objects decide between them."""

import hashlib
import json
import re
import shutil
import time
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from tests.object_store import BUCKET, Wire, client, machine
from tests.unit.store.processes import LIMIT_S, kill_after, start
from verl_omni_core.cli.main import app
from verl_omni_core.errors import ConfigError, FencedError, StoreError
from verl_omni_core.settings.check import check
from verl_omni_core.settings.loader import load
from verl_omni_core.store import attempt as attempt_module
from verl_omni_core.store import mirror, remote_lease, runs, trusted
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.lease import Ownership, is_owned, owners, take_ownership
from verl_omni_core.store.ledger import Ledger
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.store.places import folder_of, remote_of, store_of
from verl_omni_core.store.rejection import reject
from verl_omni_core.store.remote import Remote

CONFIG = {"run": {"id": "r", "steps": 3}}


def table(start: int) -> pa.Table:
    return pa.table({"sample_index": pa.array(range(start, start + 4), pa.int64()), "x": [0.5] * 4})


def commit(
    store: RunStore, step: int = 1, stage: str = "rollout", parents: tuple[ArtifactRef, ...] = ()
) -> ArtifactRef:
    attempt = store.attempt(step, stage, "k")
    files = [attempt.write_table("samples", n, table(4 * n)) for n in range(2)]
    files.append(attempt.write_file("notes/a.txt", b"hello"))
    return attempt.commit(files, rows=8, parents=parents, producer={})


@pytest.fixture
def a(uri, tmp_path) -> Path:
    """The run's folder on machine a, where the run was made."""
    folder = machine(tmp_path / "a", uri)
    return runs.create_run(folder, CONFIG, code_version="1", run_id="r").root


@pytest.fixture
def b(uri, tmp_path, a) -> Path:
    """The run's folder on machine b, which has opened the run."""
    return runs.open_run(machine(tmp_path / "b", uri), "r").root


def take_expired(root: Path, owner: str) -> Ownership:
    """Take a run whose owner has not renewed its lease for long."""
    with mock.patch.object(remote_lease, "MARGIN_S", -1e6):
        return take_ownership(root, owner)


def objects(root: Path) -> list[str]:
    return remote_of(root).files()


def damage(endpoint: str, root: Path, path: Path, content: bytes) -> None:
    remote = remote_of(root)
    client(endpoint).put_object(Bucket=BUCKET, Key=f"{remote.prefix}/{path.relative_to(root).as_posix()}", Body=content)


def test_a_run_made_on_one_machine_is_read_on_another(a, b):
    with take_ownership(a, "flow a") as own:
        ref = commit(RunStore(a, epoch=own.epoch))
        Ledger(a, epoch=own.epoch).append({"step": 1})
    assert a != b
    assert json.loads((b / "run.json").read_bytes()) == json.loads((a / "run.json").read_bytes())
    reader = RunStore(b)
    assert reader.steps() == [1]
    assert reader.committed(1, "rollout", "k") == ref
    assert reader.table(ref, "samples")["sample_index"].to_pylist() == list(range(8))
    assert reader.path_of(ref, "notes/a.txt").read_bytes() == b"hello"
    reader.verify(ref)
    assert [record["step"] for record in Ledger(b).records()] == [1]
    assert [owner["owner"] for owner in owners(b)] == ["flow a"]


def test_one_file_of_an_artifact_brings_those_beside_it(a, b):
    with take_ownership(a, "flow") as own:
        ref = commit(RunStore(a, epoch=own.epoch))
    folder = RunStore(b).path_of(ref, "samples-00000.arrow").parent
    assert sorted(path.name for path in folder.glob("*.arrow")) == ["samples-00000.arrow", "samples-00001.arrow"]


def test_a_run_whose_folder_of_copies_was_deleted_is_whole_again(a):
    with take_ownership(a, "flow") as own:
        refs = [commit(RunStore(a, epoch=own.epoch), step) for step in (1, 2)]
        for step in (1, 2):
            Ledger(a, epoch=own.epoch).append({"step": step})
    shutil.rmtree(a)
    again = runs.open_run(a.parent, "r")
    with take_ownership(again.root, "flow again") as own:
        store = RunStore(a, epoch=own.epoch)
        assert own.epoch == 2
        assert [store.find(step, "rollout") for step in (1, 2)] == refs
        for ref in refs:
            store.verify(ref)
        assert Ledger(a, epoch=own.epoch).append({"step": 3}) == 3


def test_the_owner_looks_for_commits_in_its_folder_alone(a, endpoint, uri, tmp_path):
    wire = Wire(endpoint)
    folder = machine(tmp_path / "counted", uri.replace(endpoint, wire.endpoint))
    root = runs.open_run(folder, "r").root
    with take_ownership(root, "flow") as own:
        store = RunStore(root, epoch=own.epoch)
        ref = commit(store)
        before = wire.requests
        for _ in range(50):
            assert store.find(1, "rollout") == ref and store.find(2, "rollout") is None
            assert store.steps() == [1]
        assert wire.requests - before <= 2  # a renewal of the lease may fall into it
    wire.close()


def test_the_first_committer_wins_and_the_loser_of_the_other_machine_gets_the_winners_reference(a, b):
    attempts = [RunStore(root).attempt(1, "rollout", "k") for root in (a, b)]
    files = [attempt.write_table("samples", 0, table(0)) for attempt in attempts]
    won = attempts[0].commit([files[0]], rows=4, parents=[], producer={})
    lost = attempts[1].commit([files[1]], rows=4, parents=[], producer={})
    assert won == lost and won.attempt == attempts[0].name
    for root in (a, b):
        store = RunStore(root)
        assert store.find(1, "rollout") == won
        store.verify(won)
    assert not attempts[1].folder.exists()
    assert not [name for name in objects(a) if attempts[1].name in name]


def test_a_stage_committed_under_another_key_on_another_machine_is_refused(a, b):
    first = RunStore(a).attempt(1, "rollout", "k")
    second = RunStore(b).attempt(1, "rollout", "other")
    first.commit([], rows=0, parents=[], producer={})
    with pytest.raises(StoreError, match=r"committed under key k, .* give key other"):
        second.commit([], rows=0, parents=[], producer={})


def test_a_commit_that_is_asked_for_again_repeats_its_answer(a):
    attempt = RunStore(a).attempt(1, "rollout", "k")
    file = attempt.write_file("x", b"1")
    first = attempt.commit([file], rows=0, parents=[], producer={})
    assert attempt.commit([file], rows=0, parents=[], producer={}) == first
    RunStore(a).verify(first)


COMMIT_PART = """
from verl_omni_core.store import attempt as module
publish = module.publish
def slow_publish(temporary, path, **options):
    if path.name == "COMMIT":
        say("there"); time.sleep(60)
    publish(temporary, path, **options)
module.publish = slow_publish
own = take_ownership(root, "writer")
attempt = RunStore(root, epoch=own.epoch).attempt(1, "rollout", "k")
attempt.commit([attempt.write_table("samples", 0, table(0))], rows=8, parents=[], producer={})
"""


def test_a_writer_killed_between_the_object_and_its_copy_has_committed(a, b):
    process = start(COMMIT_PART, a)
    kill_after(process, "there")
    ref = RunStore(b).find(1, "rollout")
    RunStore(b).verify(ref)
    began = time.monotonic()
    with take_ownership(a, "next") as own:  # its own machine need not wait for the lease
        assert RunStore(a, epoch=own.epoch).committed(1, "rollout", "k") == ref
    assert time.monotonic() - began < LIMIT_S


def test_a_second_owner_is_refused_while_the_lease_is_fresh_with_the_holders_name(a, b):
    with take_ownership(a, "flow a") as own:
        assert is_owned(a) and is_owned(b)
        with pytest.raises(FencedError, match=r"run r is owned by flow a \(process \d+ on .*\); wait for it"):
            take_ownership(b, "flow b")
        own.check()
    assert not is_owned(b)  # released, so nobody waits for the lease to expire
    with take_ownership(b, "flow b") as own:
        assert own.epoch == 2


def test_an_owner_killed_on_another_machine_keeps_the_run_until_its_lease_expires(a, b):
    process = start('own = take_ownership(root, "flow a")\nsay("there")\ntime.sleep(60)\n', a)
    kill_after(process, "there")
    with pytest.raises(FencedError, match=r"owned by flow a"):
        take_ownership(b, "flow b")
    with take_expired(b, "flow b") as own:
        assert own.epoch == 2


def test_a_zombie_is_refused_after_a_takeover(a, b):
    first = take_ownership(a, "flow a")
    zombie, ledger = RunStore(a, epoch=first.epoch), Ledger(a, epoch=first.epoch)
    ledger.append({"step": 1})
    attempt = zombie.attempt(1, "rollout", "k")
    file = attempt.write_file("x", b"late")
    with take_expired(b, "flow b") as second:
        for act in (
            lambda: attempt.commit([file], rows=0, parents=[], producer={}),
            lambda: ledger.append({"step": 2}),
            lambda: zombie.attempt(2, "rollout", "k"),
            zombie.sweep,
            first.check,
        ):
            with pytest.raises(FencedError, match=r"epoch 1 .* has ended: epoch 2 belongs to flow b"):
                act()
        store = RunStore(b, epoch=second.epoch)
        assert store.find(1, "rollout") is None
        ref = commit(store)
        assert Ledger(b, epoch=second.epoch).append({"step": 2}) == 2
        first.release()
        assert is_owned(a) and second.epoch == 2
        second.check()
    assert RunStore(a).find(1, "rollout") == ref
    assert [record["fence_epoch"] for record in Ledger(a).records()] == [1, 2]


def test_an_owner_that_cannot_renew_its_lease_stops_before_another_may_take_the_run(
    a, uri, endpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(remote_lease, "LEASE_S", 2.0)
    wire = Wire(endpoint)
    root = runs.open_run(machine(tmp_path / "far", uri.replace(endpoint, wire.endpoint)), "r").root
    clock = [remote_lease.now()]
    monkeypatch.setattr(remote_lease, "now", lambda: clock[0])
    own = take_ownership(root, "far flow")
    clock[0] += 1.5
    own._heartbeat.renew()
    clock[0] += 1.9
    own.check()
    clock[0] += 0.2
    with pytest.raises(FencedError, match=r"last renewed 2 s ago, and after 2 s another machine may own the run"):
        own.check()
    with pytest.raises(FencedError, match=r"this process must stop"):
        RunStore(root, epoch=own.epoch).attempt(1, "rollout", "k")
    with pytest.raises(FencedError, match=r"this process must stop"):  # and does not come back to life
        own._heartbeat.renew()
    own.release()
    wire.close()


def test_a_lease_is_renewed_while_its_owner_works(a, b, monkeypatch):
    monkeypatch.setattr(remote_lease, "RENEW_S", 0.05)
    with take_ownership(a, "flow") as own:
        (a / "report.html").write_text("half")
        deadline = time.monotonic() + LIMIT_S
        while not {f"lease/{own.epoch}.json", "report.html"} <= set(objects(b)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (a / "report.html").write_text("whole")  # what only informs goes along, at the latest when the owner lets go
    assert remote_of(b).read("report.html") == b"whole"
    assert json.loads(remote_of(b).read("lease/1.json"))["released"]
    assert not [name for name in objects(b) if "lock" in name or ".tmp" in name]


def test_a_large_file_that_only_informs_does_not_hold_up_the_lease(a, b, monkeypatch):
    monkeypatch.setattr(mirror, "_LARGEST", 10)
    with take_ownership(a, "flow"):
        (a / "report.html").write_bytes(bytes(10))
        (a / "curves.html").write_bytes(bytes(11))
    assert "report.html" in objects(b) and "curves.html" not in objects(b)


def test_a_server_that_replaces_what_was_only_to_be_created_is_refused(a, uri, endpoint, tmp_path):
    wire = Wire(endpoint)
    wire.replaced = (b"If-None-Match", b"X-Nothing-For")
    root = runs.open_run(machine(tmp_path / "c", uri.replace(endpoint, wire.endpoint)), "r").root
    with pytest.raises(StoreError, match=r"cannot tell two owners apart; use a server that honours conditional writes"):
        take_ownership(root, "flow")
    wire.close()


def test_finished_shards_of_another_machine_are_adopted(a, b):
    first = take_ownership(a, "flow a")
    attempt = RunStore(a, epoch=first.epoch).attempt(1, "rollout", "k")
    attempt.finish_shard(0, [attempt.write_table("samples", 0, table(0))], {"pack": 0})
    attempt.write_table("samples", 1, table(4))  # not finished
    first.release()
    with take_ownership(b, "flow b") as own:
        store = RunStore(b, epoch=own.epoch)
        assert store.sweep() == 0
        found = store.finished_shards(1, "rollout", "k")
        assert {number: dict(record.payload) for number, record in found.items()} == {0: {"pack": 0}}
        assert store.finished_shards(1, "rollout", "other") == {}
        mine = store.attempt(1, "rollout", "k")
        adopted = mine.adopt(found[0])
        ref = mine.commit([*adopted.files, mine.write_table("samples", 1, table(4))], rows=8, parents=[], producer={})
        assert store.table(ref, "samples")["sample_index"].to_pylist() == list(range(8))
    with take_ownership(a, "flow a again") as own:
        store = RunStore(a, epoch=own.epoch)
        assert store.find(1, "rollout") == ref and store.sweep() == 1
        store.verify(ref)  # the adopted file does not go with the attempt that it came from
        assert not [name for name in objects(a) if attempt.name in name]


def test_a_commit_names_no_file_that_is_not_among_the_objects(a, b):
    attempt = RunStore(a).attempt(1, "checkpoint", "k")
    (attempt.folder / "weights").write_bytes(b"1234")
    linked = attempt.record_file("weights", 4, hashlib.sha256(b"1234").hexdigest())
    written = attempt.write_file("state", b"12")
    remote_of(a).delete(f"steps/000001/checkpoint/attempts/{attempt.name}/state")  # as if it had never arrived
    ref = attempt.commit([linked, written], rows=0, parents=[], producer={})
    assert [RunStore(b).path_of(ref, name).read_bytes() for name in ("weights", "state")] == [b"1234", b"12"]


def test_a_shard_is_finished_once_also_by_two_machines(a, b):
    attempt = RunStore(a).attempt(1, "rollout", "k")
    elsewhere = attempt_module.Attempt(str(b), 1, "rollout", "k", attempt.name, 0)
    elsewhere.folder.mkdir(parents=True)
    one = attempt.finish_shard(0, [attempt.write_table("samples", 0, table(0))], {"by": "a"})
    two = elsewhere.finish_shard(0, [elsewhere.write_table("samples", 0, table(4))], {"by": "b"})
    assert one == two and dict(two.payload) == {"by": "a"}


@pytest.mark.parametrize("change", [lambda d: d[:-9], lambda d: d[:700] + bytes([d[700] ^ 1]) + d[701:]])
def test_an_object_that_was_cut_or_changed_is_found_by_its_digest(a, b, endpoint, change):
    with take_ownership(a, "flow") as own:
        ref = commit(RunStore(a, epoch=own.epoch))
    [path] = a.rglob("samples-00001.arrow")
    content = path.read_bytes()
    damage(endpoint, a, path, change(content))
    with pytest.raises(StoreError, match=r"samples-00001.arrow has (\d+ bytes|sha256)"):
        RunStore(b).table(ref, "samples")
    damage(endpoint, a, path, content)
    assert RunStore(b).table(ref, "samples").num_rows == 8  # the damaged copy is replaced


@pytest.mark.parametrize("change", [lambda d: d[:-9], lambda d: d[:700] + bytes([d[700] ^ 1]) + d[701:]])
def test_a_damaged_copy_is_copied_anew(a, change, monkeypatch):
    ref = commit(RunStore(a))
    [path] = a.rglob("samples-00000.arrow")
    content = path.read_bytes()
    path.write_bytes(change(content))
    monkeypatch.setattr(trusted, "_trusted", {})
    assert RunStore(a).table(ref, "samples").num_rows == 8
    assert path.read_bytes() == content


def test_a_changed_manifest_is_found_by_its_digest(a, b, endpoint):
    ref = commit(RunStore(a))
    [path] = a.rglob("manifest.json")
    damage(endpoint, a, path, path.read_bytes().replace(b'"row_count": 8', b'"row_count": 9'))
    with pytest.raises(StoreError, match=r"manifest.json has sha256"):
        RunStore(b).manifest(ref)


def test_a_result_taken_back_on_one_machine_is_undone_on_the_other(a, b):
    with take_ownership(a, "flow a") as own:
        store = RunStore(a, epoch=own.epoch)
        ref = commit(store)
        child = commit(store, stage="reward", parents=(ref,))
    with take_ownership(b, "flow b") as own:
        store = RunStore(b, epoch=own.epoch)
        assert reject(store, ref, "wrong") == [child, ref]
        assert RunStore(a).find(1, "rollout") is None  # also while a's copy of the marker is still there
    assert any(a.rglob("COMMIT"))
    with take_ownership(a, "flow a") as own:
        store = RunStore(a, epoch=own.epoch)
        assert store.find(1, "rollout") is None and store.find(1, "reward") is None
        assert store.finished_shards(1, "rollout", "k") == {}
        again = commit(store)
    assert RunStore(b).find(1, "rollout") == again != ref


def test_a_marker_that_was_replaced_on_the_other_machine_is_read_anew(a, b):
    with take_ownership(a, "flow a") as own:
        ref = commit(RunStore(a, epoch=own.epoch))
    with take_ownership(b, "flow b") as own:
        store = RunStore(b, epoch=own.epoch)
        reject(store, ref, "wrong")
        again = commit(store)
    with take_ownership(a, "flow a") as own:
        store = RunStore(a, epoch=own.epoch)
        assert store.find(1, "rollout") == again
        store.verify(again)


def test_ledgers_of_two_machines_are_one(a, b):
    one, two = Ledger(a), Ledger(b)
    assert one.append({"by": "a"}) == 1
    assert two.append({"by": "b"}) == 2
    with pytest.raises(FencedError, match=r"somebody else wrote to the ledger"):
        one.append({"by": "a"})
    for root in (a, b):
        assert [record["by"] for record in Ledger(root).records()] == ["a", "b"]


def test_a_record_lost_from_both_tiers_is_named(a):
    ledger = Ledger(a)
    for step in (1, 2, 3):
        ledger.append({"step": step})
    (a / "ledger" / f"{2:012d}.json").unlink()
    assert len(Ledger(a).records()) == 3  # its object is copied again
    (a / "ledger" / f"{2:012d}.json").unlink()
    remote_of(a).delete(f"ledger/{2:012d}.json")
    with pytest.raises(StoreError, match=r"lacks record 2 of 3"):
        Ledger(a).records()


def test_a_run_of_an_object_store_is_made_once(a, uri, tmp_path):
    elsewhere = machine(tmp_path / "c", uri)
    with pytest.raises(StoreError, match=rf"run 'r' exists in {uri.split('?')[0]}"):
        runs.create_run(elsewhere, CONFIG, code_version="1", run_id="r")
    assert runs.run_exists(elsewhere, "r") and not runs.run_exists(elsewhere, "q")
    with pytest.raises(StoreError, match=r"has no run 'q'; it has r"):
        runs.open_run(elsewhere, "q")
    assert store_of(elsewhere) == uri


def test_settings_of_a_later_start_reach_the_other_machine(a, b):
    with take_ownership(b, "flow b") as own:
        later = {"run": {"id": "r", "steps": 9}}
        runs.open_run(b.parent, "r").record_settings(later, epoch=own.epoch, code_version="2")
    assert runs.open_run(a.parent, "r").config == later


def test_a_listing_names_runs_of_other_machines_without_their_artifacts(a, uri, tmp_path):
    with take_ownership(a, "flow") as own:
        commit(RunStore(a, epoch=own.epoch), 1, "update")
        runs.open_run(a.parent, "r").write_progress(status="running", step=1, reward=0.25)
        store = machine(tmp_path / "c", uri)
        [run] = runs.list_runs(store)
        assert (run.run_id, run.status, run.steps, run.steps_done) == ("r", "running", 3, 1)
    [run] = runs.list_runs(store)
    assert (run.status, run.steps_done, run.reward) == ("interrupted", 1, 0.25)
    assert not any(store.rglob("*.arrow")) and not any(store.rglob("manifest.json"))
    assert runs.list_runs(machine(tmp_path / "d", uri.replace("?", "-none?"))) == []


def test_a_copy_of_another_run_of_that_name_is_refused_and_kept(a, b, uri):
    remote = remote_of(a)
    for name in remote.files():
        remote.delete(name)
    for act in (
        lambda: runs.open_run(b.parent, "r"),
        lambda: runs.create_run(b.parent, CONFIG, code_version="1", run_id="r"),
    ):
        with pytest.raises(StoreError, match=r"there is none any more; delete the folder, it is only a cache"):
            act()
    shutil.rmtree(a)
    runs.create_run(a.parent, CONFIG, code_version="1", run_id="r")
    with pytest.raises(StoreError, match=r"is another run now; delete the folder"):
        runs.open_run(b.parent, "r")
    assert (b / "run.json").exists()


def test_an_address_and_its_folder_are_one_store(uri, aws, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_OMNI_HOME", str(tmp_path))
    folder = folder_of(uri)
    assert folder.parent == tmp_path / "stores" and folder_of(folder) == folder
    assert remote_of(folder / "x") == Remote.parse(uri).within("x")
    root = runs.create_run(uri, CONFIG, code_version="1", run_id="x").root
    assert root == folder / "x" == runs.open_run(folder, "x").root
    assert [run.run_id for run in runs.list_runs(uri)] == ["x"]


def test_a_local_run_has_no_objects(tmp_path):
    root = runs.create_run(tmp_path / "runs", CONFIG, code_version="1", run_id="r").root
    assert remote_of(root) is None and store_of(root.parent) == str(tmp_path / "runs")
    with take_ownership(root, "flow") as own:
        assert own._heartbeat is None and (root / ".lock").read_bytes() == b""


def test_a_damaged_note_of_the_address_is_named(uri, aws, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_OMNI_HOME", str(tmp_path))
    (folder_of(uri) / "remote.json").write_text('{"store": 3')
    for key in ("a", "b"):
        with pytest.raises((StoreError, ConfigError), match=r"remote.json is damaged"):
            remote_of(folder_of(uri) / key)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda uri: uri.replace(BUCKET, "nowhere"), r"run.store: .*s3://nowhere/.*make the bucket first"),
        (lambda uri: uri.replace("scheme=http", "scheme=ftp"), r"is no address of one"),
    ],
)
def test_settings_with_a_store_that_cannot_be_used_are_refused_before_anything_starts(uri, change, said):
    config = load("glyph-flow_grpo-ocr-cpu", overrides=["rollout.name=diffusers", f"run.store={change(uri)}"]).config
    with pytest.raises(ConfigError, match=said):
        check(config)


def test_the_command_line_takes_an_address_where_it_takes_a_folder(a, uri):
    listed = CliRunner().invoke(app, ["runs", "--store", uri])
    assert listed.exit_code == 0 and re.search(r"^r +train +new +0/3", listed.stdout, re.MULTILINE)
    missing = CliRunner().invoke(app, ["export", "q", "--out", "x", "--store", uri])
    assert missing.exit_code == 2 and "has no run 'q'; it has r" in " ".join(missing.output.split())
