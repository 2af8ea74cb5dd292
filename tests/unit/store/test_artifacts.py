"""What is committed can be read, as it was written, and only that."""

import errno
import json
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.unit.store.processes import LIMIT_S, REPOSITORY
from verl_omni_core.batches.schema import check_schema, metadata_of
from verl_omni_core.batches.tables import build_table, read_tensor
from verl_omni_core.errors import ContractError, FencedError, StoreError
from verl_omni_core.store import attempt as attempt_module
from verl_omni_core.store import trusted
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.manifest import ArtifactRef, Manifest, sha256


@pytest.fixture
def store(tmp_path) -> RunStore:
    return RunStore(tmp_path)


def table(indices: list[int]) -> pa.Table:
    return pa.table({"sample_index": pa.array(indices, pa.int64()), "x": pa.array([i * 0.5 for i in indices])})


def commit(store: RunStore, *shards: list[int], step: int = 1, key: str = "k", parents=()) -> ArtifactRef:
    attempt = store.attempt(step, "rollout", key, parents=parents)
    files = [attempt.write_table("samples", number, table(indices)) for number, indices in enumerate(shards)]
    return attempt.commit(files, rows=sum(map(len, shards)), parents=list(parents), producer={"engine": "test"})


def flip_bit(path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset if offset >= 0 else len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def forget(monkeypatch) -> None:
    """Make this process one that has not written or verified anything."""
    monkeypatch.setattr(trusted, "_trusted", {})


def test_a_committed_stage_is_found_and_read_by_its_reference(store):
    assert store.committed(1, "rollout", "k") is None
    ref = commit(store, [0, 1], [2, 3])
    assert store.committed(1, "rollout", "k") == ref
    assert store.table(ref, "samples")["x"].to_pylist() == [0, 0.5, 1, 1.5]
    assert [shard.num_rows for shard in store.tables(ref, "samples")] == [2, 2]
    assert store.steps() == [1]


def test_nothing_of_an_uncommitted_attempt_can_be_found(store):
    attempt = store.attempt(1, "rollout", "k")
    attempt.write_table("samples", 0, table([0]))
    assert store.committed(1, "rollout", "k") is None
    assert store.find(1, "rollout") is None


def test_a_reference_is_small_and_survives_json_and_pickle(store):
    ref = commit(store, [0])
    assert len(json.dumps(ref.to_json())) < 1000
    assert ArtifactRef.from_json(json.loads(json.dumps(ref.to_json()))) == ref
    assert pickle.loads(pickle.dumps(ref)) == ref
    assert pickle.loads(pickle.dumps(store)).table(ref, "samples").num_rows == 1


def test_the_manifest_tells_files_parents_and_producer(store):
    parent = commit(store, [0], step=1)
    ref = commit(store, [0, 1], step=2, parents=[parent])
    manifest = store.manifest(ref)
    assert (manifest.stage_key, manifest.row_count, manifest.parents) == ("k", 2, (parent,))
    assert manifest.producer["engine"] == "test"
    assert {"host", "started", "finished", "code_version", "config_digest"} <= manifest.producer.keys()
    assert [file.name for file in manifest.files] == ["samples-00000.arrow"]
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_every_file_carries_where_it_comes_from(store, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"config_digest": "c", "code_version": "9"}))
    parent = commit(store, [0], step=1)
    attempt = store.attempt(2, "advantage", "k", parents=[parent], weights_version=7)
    attempt.write_table("samples", 3, table([0]))
    [path] = attempt.folder.glob("*.arrow")
    origin = metadata_of(pa.ipc.open_file(pa.memory_map(str(path))).schema)
    assert (origin.run_id, origin.step, origin.stage, origin.shard) == (tmp_path.name, 2, "advantage", 3)
    assert (origin.config_digest, origin.code_version, origin.weights_version) == ("c", "9", 7)
    assert origin.parents == (parent.manifest_sha256,)
    assert origin.row_order == "sample_index"


def test_a_table_comes_in_sample_order_whatever_the_order_of_shards_and_rows(store):
    ref = commit(store, [5, 4], [1, 0], [3, 2])
    whole = store.table(ref, "samples")
    assert whole["sample_index"].to_pylist() == list(range(6))
    assert whole["x"].to_pylist() == [i * 0.5 for i in range(6)]
    assert store.table(ref, "samples", columns=["x"])["x"].to_pylist() == [i * 0.5 for i in range(6)]


def test_shards_that_follow_each_other_are_read_without_a_copy(store):
    attempt = store.attempt(1, "rollout", "k")
    files = []
    for shard in (1, 0):
        columns = {"sample_index": np.arange(4) + 4 * shard, "x": np.zeros(4)}
        files.append(attempt.write_table("samples", shard, pa.table(columns)))
    ref = attempt.commit(files, rows=8, parents=[], producer={})
    before = pa.total_allocated_bytes()
    whole = store.table(ref, "samples")
    assert pa.total_allocated_bytes() - before < 1000
    assert whole["sample_index"].to_pylist() == list(range(8))


def test_tensors_and_dictionaries_of_several_shards_come_back_in_order(store):
    attempt = store.attempt(1, "rewards", "k")
    files = []
    for shard, indices in enumerate(([2, 3], [1, 0])):
        columns = {"sample_index": indices, "sample_id": [str(i) for i in indices], "reward_name": [f"n{shard}"] * 2,
                   "weight": [1.0] * 2, "required": [True] * 2, "score": [None, 0.5], "status": ["ok"] * 2,
                   "error": [None] * 2, "attempts": [1] * 2, "latency_s": [0.1] * 2, "scorer_version": ["1"] * 2,
                   "latents": torch.tensor([[float(i), -0.0] for i in indices]).bfloat16()}  # fmt: skip
        files.append(attempt.write_table("rewards", shard, build_table("rewards", columns)))
    whole = store.table(attempt.commit(files, rows=4, parents=[], producer={}), "rewards")
    check_schema(whole, "rewards")
    assert whole["reward_name"].to_pylist() == ["n1", "n1", "n0", "n0"]
    assert read_tensor(whole, "latents")[:, 0].tolist() == [0, 1, 2, 3]


def test_a_shard_without_rows_is_no_obstacle(store):
    assert commit(store, [], [0, 1]).rows == 2
    assert store.table(store.find(1, "rollout"), "samples").num_rows == 2
    assert store.table(commit(store, [], step=2), "samples").num_rows == 0


def test_shards_of_different_schemas_are_refused(store):
    attempt = store.attempt(1, "rollout", "k")
    files = [attempt.write_table("t", 0, pa.table({"x": [1]})), attempt.write_table("t", 1, pa.table({"x": ["a"]}))]
    ref = attempt.commit(files, rows=2, parents=[], producer={})
    with pytest.raises(ContractError, match=r"do not fit together"):
        store.table(ref, "t")


def test_the_first_of_two_commits_wins_and_both_get_its_reference(store):
    first, second = store.attempt(1, "rollout", "k"), store.attempt(1, "rollout", "k")
    refs = [
        a.commit([a.write_table("samples", 0, table([0]))], rows=1, parents=[], producer={}) for a in (first, second)
    ]
    assert refs[0] == refs[1]
    assert refs[0].attempt == first.name
    assert not second.folder.exists()


def test_a_commit_that_is_called_twice_gives_the_same_answer(store):
    attempt = store.attempt(1, "rollout", "k")
    file = attempt.write_table("samples", 0, table([0]))
    refs = [attempt.commit([file], rows=1, parents=[], producer={}) for _ in range(2)]
    assert refs[0] == refs[1]
    store.verify(refs[0])


def test_a_commit_under_another_key_is_refused_and_leaves_no_files(store):
    ref = commit(store, [0], key="a")
    late = store.attempt(1, "rollout", "b")
    file = late.write_table("samples", 0, table([9]))
    with pytest.raises(StoreError, match=r"committed under key a.*give key b.*start a new run"):
        late.commit([file], rows=1, parents=[], producer={})
    assert not late.folder.exists()
    assert store.find(1, "rollout") == ref
    with pytest.raises(StoreError, match=r"committed under key a"):
        store.committed(1, "rollout", "b")


def test_many_threads_that_commit_one_stage_agree(store):
    refs = []

    def work(number: int) -> None:
        attempt = store.attempt(1, "rollout", "k")
        file = attempt.write_table("samples", 0, table([number]))
        refs.append(attempt.commit([file], rows=1, parents=[], producer={}))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(refs) == 8
    assert len(set(refs)) == 1
    store.verify(refs[0])
    assert len(list((attempt_folder(store)).iterdir())) == 1


def attempt_folder(store: RunStore):
    return store._stage_folder(1, "rollout") / "attempts"


def test_the_process_that_wrote_a_file_does_not_hash_it_again_and_another_one_does(store, monkeypatch):
    ref = commit(store, [0, 1])
    path = store.path_of(ref, "samples-00000.arrow")
    flip_bit(path, offset=path.read_bytes().index(np.float64(0.5).tobytes()))
    assert store.table(ref, "samples")["x"].to_pylist() != [0, 0.5]
    forget(monkeypatch)
    with pytest.raises(StoreError, match=r"changed or the disk damaged it"):
        store.tables(ref, "samples")


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_one_flipped_bit_anywhere_in_a_shard_is_found_in_another_process(store, place):
    ref = commit(store, list(range(100)))
    path = store.path_of(ref, "samples-00000.arrow")
    flip_bit(path, offset=int(path.stat().st_size * place))
    program = (
        "import sys, json\nfrom verl_omni_core.store.artifacts import RunStore\n"
        "from verl_omni_core.store.manifest import ArtifactRef\n"
        "RunStore(sys.argv[1]).table(ArtifactRef.from_json(json.loads(sys.argv[2])), 'samples')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, store.root, json.dumps(ref.to_json())], capture_output=True, text=True,
        timeout=LIMIT_S, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "StoreError" in done.stderr
    assert "its manifest says" in done.stderr


def test_a_cut_or_missing_shard_is_found_at_once(store):
    ref = commit(store, [0, 1])
    path = store.path_of(ref, "samples-00000.arrow")
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(StoreError, match=r"bytes, its manifest says"):
        store.tables(ref, "samples")
    path.unlink()
    with pytest.raises(StoreError, match=r"no file"):
        store.path_of(ref, "samples-00000.arrow")


@pytest.mark.parametrize(
    "damage", [lambda d: d[: len(d) // 2], lambda data: data[:0], lambda d: d.replace(b'"k"', b'"j"')]
)
def test_a_torn_or_changed_manifest_is_refused(store, damage):
    ref = commit(store, [0])
    path = store._attempt_folder(ref) / "manifest.json"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError, match=r"torn or was changed"):
        store.committed(1, "rollout", "k")


def test_a_lost_manifest_and_a_damaged_marker_are_named(store):
    ref = commit(store, [0])
    (store._attempt_folder(ref) / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"missing, though its stage is committed"):
        store.committed(1, "rollout", "k")
    (store._stage_folder(1, "rollout") / "COMMIT").write_text("{")
    with pytest.raises(StoreError, match=r"COMMIT is damaged"):
        store.find(1, "rollout")


def test_a_table_file_or_column_that_does_not_exist_is_refused_with_those_that_do(store):
    ref = commit(store, [0])
    with pytest.raises(StoreError, match=r"no table 'media'; it has \['samples'\]"):
        store.table(ref, "media")
    with pytest.raises(StoreError, match=r"no file 'x.png'"):
        store.path_of(ref, "x.png")
    with pytest.raises(StoreError, match=r"no columns \['y'\]"):
        store.table(ref, "samples", columns=["y"])


def test_files_that_are_no_tables_are_kept_with_their_digests(store, monkeypatch):
    attempt = store.attempt(1, "checkpoint", "k")
    written = attempt.write_file("adapter.safetensors", b"weights")
    (attempt.folder / "state").mkdir()
    (attempt.folder / "state" / "part-0").write_bytes(b"moments")
    added = attempt.add_file("state/part-0")
    empty = attempt.write_file("empty", b"")
    ref = attempt.commit([written, added, empty], rows=0, parents=[], producer={})
    forget(monkeypatch)
    assert store.path_of(ref, "adapter.safetensors").read_bytes() == b"weights"
    assert store.path_of(ref, "state/part-0").read_bytes() == b"moments"
    store.verify(ref)
    flip_bit(store.path_of(ref, "state/part-0"))
    with pytest.raises(StoreError, match=r"part-0"):
        store.verify(ref)


@pytest.mark.parametrize("name", ["../out", "/etc/x", "a/../../b", "", "a\\b"])
def test_a_file_name_cannot_leave_its_folder(store, name):
    attempt = store.attempt(1, "checkpoint", "k")
    with pytest.raises(StoreError, match=r"would leave its folder"):
        attempt.write_file(name, b"x")
    evil = ArtifactRef("checkpoint", 1, "k", "0" * 64, name, 0)
    with pytest.raises(StoreError):
        store.manifest(evil)


@pytest.mark.parametrize("stage", ["../x", "Rollout", "", "a/b"])
def test_a_stage_name_cannot_leave_its_folder(store, stage):
    with pytest.raises(StoreError, match=r"no legal name"):
        store.attempt(1, stage, "k")


def test_a_commit_names_files_that_exist_and_each_shard_once(store):
    attempt = store.attempt(1, "rollout", "k")
    files = [attempt.write_table("samples", 0, table([0])) for _ in range(2)]
    assert files[0].name != files[1].name  # a second delivery of a pack does not touch the first
    with pytest.raises(ContractError, match=r"two files are shard 0"):
        attempt.commit(files, rows=1, parents=[], producer={})
    (attempt.folder / files[0].name).unlink()
    with pytest.raises(StoreError, match=r"no file"):
        attempt.commit(files[:1], rows=1, parents=[], producer={})
    assert attempt.commit(files[1:], rows=1, parents=[], producer={}).rows == 1


def test_without_the_free_space_to_keep_nothing_is_written(store, tmp_path):
    full = RunStore(tmp_path, min_free_bytes=1 << 60)
    with pytest.raises(StoreError, match=r"GB are free, .* GB are needed"):
        full.attempt(1, "rollout", "k")
    assert not (tmp_path / "steps").exists()


def test_a_table_larger_than_the_free_space_is_refused_before_it_is_written(store, monkeypatch):
    attempt = store.attempt(1, "rollout", "k")
    monkeypatch.setattr("verl_omni_core.store.durable_files.free_bytes", lambda _: 1000)
    with pytest.raises(StoreError, match=r"are needed"):
        attempt.write_table("samples", 0, table(list(range(1000))))
    assert not list(attempt.folder.glob("*.arrow"))


def test_a_disk_that_fills_up_in_mid_write_leaves_no_file_and_no_commit(store, monkeypatch):
    attempt = store.attempt(1, "rollout", "k")

    def full(path, table):
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(attempt_module, "_write_arrow", full)
        with pytest.raises(StoreError, match=r"disk is full"):
            attempt.write_table("samples", 0, table([0]))
    assert not list(attempt.folder.glob("*.arrow"))
    assert commit(store, [0]).rows == 1


FILL = """
mount -t tmpfs -o size=3m tmpfs "$1" || exit 77
exec "$2" -c '
import sys, numpy as np, pyarrow as pa
from verl_omni_core.errors import StoreError
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store import attempt as a, durable_files as d
store = RunStore(sys.argv[1])
attempt = store.attempt(1, "rollout", "k")
a.check_free = lambda *args: None  # as when another process takes the space after the check
try:
    attempt.write_table("big", 0, pa.table({"x": np.random.default_rng(0).random(1_000_000)}))
except StoreError as error:
    assert "disk is full" in str(error), error
else:
    raise SystemExit("8 MB fitted into 3 MB")
assert not list(attempt.folder.glob("*.arrow"))
file = attempt.write_table("small", 0, pa.table({"x": [1.0]}))
ref = attempt.commit([file], rows=1, parents=[], producer={})
assert store.table(ref, "small").num_rows == 1
print("survived")
' "$1"
"""


def test_a_really_full_disk_is_reported_and_survived(tmp_path):
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", FILL, "sh", str(tmp_path), sys.executable], capture_output=True, text=True,
        timeout=LIMIT_S, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=False,
    )  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this host lets nobody mount a small file system")
    assert done.stdout.strip() == "survived", done.stderr


def test_finished_shards_of_a_dead_attempt_are_adopted_and_the_rest_produced(store):
    dead = store.attempt(1, "rollout", "k")
    for shard in (0, 2):
        dead.finish_shard(shard, [dead.write_table("samples", shard, table([shard]))], {"t": shard})
    dead.write_table("samples", 1, table([1]))  # not finished: perhaps other tables of the pack are missing
    other = store.attempt(1, "rollout", "other")
    other.finish_shard(1, [other.write_table("samples", 1, table([99]))])

    found = store.finished_shards(1, "rollout", "k")
    assert sorted(found) == [0, 2]
    retry = store.attempt(1, "rollout", "k")
    records = [retry.adopt(found[shard]) for shard in sorted(found)]
    assert [record.payload for record in records] == [{"t": 0}, {"t": 2}]
    files = [file for record in records for file in record.files] + [retry.write_table("samples", 1, table([1]))]
    ref = retry.commit(files, rows=3, parents=[], producer={})
    dead.discard()
    assert store.table(ref, "samples")["sample_index"].to_pylist() == [0, 1, 2]


def test_a_shard_that_is_delivered_twice_is_finished_once(store):
    attempt = store.attempt(1, "rollout", "k")
    first = attempt.finish_shard(0, [attempt.write_table("samples", 0, table([0]))])
    second = attempt.finish_shard(0, [attempt.write_table("samples", 0, table([0]))])
    assert first == second
    ref = attempt.commit(list(second.files), rows=1, parents=[], producer={})
    assert store.table(ref, "samples").num_rows == 1


def test_a_damaged_finished_shard_is_produced_again(store, monkeypatch):
    dead = store.attempt(1, "rollout", "k")
    for shard in (0, 1):
        dead.finish_shard(shard, [dead.write_table("samples", shard, table([shard]))])
    flip_bit(dead.folder / "samples-00000.arrow")
    forget(monkeypatch)
    assert sorted(store.finished_shards(1, "rollout", "k")) == [1]


def test_a_swept_attempt_cannot_write_any_more(store):
    attempt = store.attempt(1, "rollout", "k")
    attempt.discard()
    with pytest.raises(FencedError, match=r"swept"):
        attempt.write_table("samples", 0, table([0]))


def test_a_file_is_recorded_by_its_writers_digest_and_refused_at_another_size(tmp_path):
    attempt = RunStore(tmp_path).attempt(1, "checkpoint", "k")
    (attempt.folder / "a.bin").write_bytes(b"abc")
    record = attempt.record_file("a.bin", 3, sha256(b"abc"))
    assert record == attempt.add_file("a.bin")
    for name, size in (("a.bin", 4), ("b.bin", 3)):
        with pytest.raises(StoreError, match="bytes were written"):
            attempt.record_file(name, size, sha256(b"abc"))
    with pytest.raises(StoreError, match="would leave its folder"):
        attempt.record_file("../a.bin", 3, sha256(b"abc"))
