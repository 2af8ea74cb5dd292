"""Processes are killed at every point; what is left is a whole stage or none, and the next owner goes on."""

import json
import random
import time

import pytest

from tests.unit.store.processes import LIMIT_S, answers, kill_after, start
from verl_omni_core.errors import FencedError
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.attempt import COMMIT
from verl_omni_core.store.lease import take_ownership
from verl_omni_core.store.ledger import Ledger
from verl_omni_core.store.manifest import ArtifactRef

ONE_STAGE = """
from verl_omni_core.store import attempt as module
point = sys.argv[2]
def stop_at(name):
    if point == name:
        say("there"); time.sleep(60)
own = take_ownership(root, "writer")
attempt = RunStore(root, epoch=own.epoch).attempt(1, "rollout", "k")
stop_at("after the attempt began")
files = [attempt.write_table("samples", 0, table(0))]
stop_at("between two files")
files.append(attempt.write_table("samples", 1, table(8)))
stop_at("after all files")
publish = module.publish
def slow_publish(temporary, path, **options):
    stop_at("before " + path.name)
    publish(temporary, path, **options)
    stop_at("after " + path.name)
module.publish = slow_publish
attempt.commit(files, rows=16, parents=[], producer={})
"""


@pytest.mark.parametrize(
    ("point", "is_done"),
    [
        ("after the attempt began", False),
        ("between two files", False),
        ("after all files", False),
        ("before manifest.json", False),
        ("after manifest.json", False),
        ("before COMMIT", False),
        ("after COMMIT", True),
    ],
)
def test_a_writer_killed_at_any_point_leaves_a_whole_stage_or_none(tmp_path, point, is_done):
    process = start(ONE_STAGE, tmp_path, point)
    kill_after(process, "there")
    with take_ownership(tmp_path, "next") as own:
        store = RunStore(tmp_path, epoch=own.epoch)
        ref = store.committed(1, "rollout", "k")
        assert (ref is not None) == is_done
        assert store.sweep() == (0 if is_done else 1)
        if ref is None:
            attempt = store.attempt(1, "rollout", "k")
            file = attempt.write_file("x", b"again")
            ref = attempt.commit([file], rows=1, parents=[], producer={})
        store.verify(ref)
        assert store.committed(1, "rollout", "k") == ref


MANY_STEPS = """
own = take_ownership(root, "writer")
store, ledger = RunStore(root, epoch=own.epoch), Ledger(root, epoch=own.epoch)
done = {record["step"] for record in ledger.records()}
say("ready")
for step in range(1, 10_000):
    ref = store.committed(step, "rollout", f"key-{step}")
    if ref is None:
        attempt = store.attempt(step, "rollout", f"key-{step}")
        files = [attempt.write_table("samples", shard, table(8 * shard)) for shard in range(2)]
        ref = attempt.commit(files, rows=16, parents=[], producer={})
    if step not in done:
        ledger.append({"step": step, "manifest": ref.manifest_sha256})
"""


def test_a_run_killed_at_random_times_loses_nothing_and_does_nothing_twice(tmp_path):
    rng = random.Random(7)
    finished = kills = 0
    deadline = time.monotonic() + 4 * LIMIT_S
    while kills < 12 or finished <= 10:  # how many steps fit between two kills depends on the machine
        assert time.monotonic() < deadline, f"{finished} steps after {kills} kills"
        kills += 1
        process = start(MANY_STEPS, tmp_path)
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.0, 0.25))
        process.kill()
        process.wait(LIMIT_S)
        store = RunStore(tmp_path)
        records = Ledger(tmp_path).records()
        committed = [step for step in store.steps() if store.find(step, "rollout") is not None]
        assert [record["step"] for record in records] == list(range(1, len(records) + 1))
        assert committed == list(range(1, len(committed) + 1))
        assert len(committed) - len(records) in (0, 1)
        assert len(records) >= finished
        finished = len(records)
        for record in records:
            ref = store.find(record["step"], "rollout")
            assert ref.manifest_sha256 == record["manifest"]
            assert store.table(ref, "samples").num_rows == 16


RACE = """
store = RunStore(root)
attempt = store.attempt(1, "rollout", sys.argv[2])
file = attempt.write_table("samples", 0, table(int(sys.argv[3])))
say("ready")
sys.stdin.readline()
try:
    say(json.dumps(attempt.commit([file], rows=8, parents=[], producer={}).to_json()))
except Exception as error:
    say(type(error).__name__, error)
"""


@pytest.mark.parametrize("keys", [("k", "k"), ("a", "b")])
def test_of_two_processes_that_race_to_commit_exactly_one_wins_and_both_know_it(tmp_path, keys):
    racers = [start(RACE, tmp_path, key, str(8 * i)) for i, key in enumerate(keys)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    said = [answers(racer)[-1] for racer in racers]
    store = RunStore(tmp_path)
    winner = store.find(1, "rollout")
    refs = [ArtifactRef.from_json(json.loads(line)) for line in said if line.startswith("{")]
    assert refs == [winner] * (2 if keys[0] == keys[1] else 1)
    assert all("StoreError" in line and "committed under key" in line for line in said if not line.startswith("{"))
    store.verify(winner)
    assert [path.name for path in (tmp_path / "steps" / "000001" / "rollout" / "attempts").iterdir()] == [
        winner.attempt
    ]
    assert not list((tmp_path / "steps" / "000001" / "rollout").glob(".tmp*"))


def test_a_zombie_of_an_older_epoch_can_neither_commit_nor_append_nor_begin(tmp_path):
    first = take_ownership(tmp_path, "first")
    zombie, ledger = RunStore(tmp_path, epoch=first.epoch), Ledger(tmp_path, epoch=first.epoch)
    attempt = zombie.attempt(1, "rollout", "k")
    file = attempt.write_file("x", b"late")
    first.release()  # as if its machine had been cut off
    second = take_ownership(tmp_path, "second")
    with pytest.raises(FencedError, match=r"epoch 1 .* has ended: epoch 2 belongs to second"):
        attempt.commit([file], rows=0, parents=[], producer={})
    with pytest.raises(FencedError):
        ledger.append({"step": 1})
    with pytest.raises(FencedError):
        zombie.attempt(2, "rollout", "k")
    with pytest.raises(FencedError):
        zombie.sweep()
    with pytest.raises(FencedError):
        first.check()
    assert not (tmp_path / "steps" / "000001" / "rollout" / COMMIT).exists()
    assert Ledger(tmp_path).records() == []
    owner = RunStore(tmp_path, epoch=second.epoch)
    fresh = owner.attempt(1, "rollout", "k")
    ref = fresh.commit([fresh.write_file("x", b"new")], rows=0, parents=[], producer={})
    assert owner.path_of(ref, "x").read_bytes() == b"new"
    assert ref.attempt.startswith("000002-")
    assert owner.manifest(ref).fence_epoch == 2


def test_a_store_without_an_epoch_cannot_commit_to_a_run_that_has_an_owner(tmp_path):
    attempt = RunStore(tmp_path).attempt(1, "rollout", "k")
    with take_ownership(tmp_path, "flow"), pytest.raises(FencedError, match=r"epoch 0"):
        attempt.commit([], rows=0, parents=[], producer={})


def test_a_sweep_keeps_winners_finished_shards_and_its_own_epoch(tmp_path):
    with take_ownership(tmp_path, "first") as own:
        old = RunStore(tmp_path, epoch=own.epoch)
        done, rest = old.attempt(1, "rollout", "k"), old.attempt(1, "rollout", "k")
        old_ref = done.commit([done.write_file("x", b"1")], rows=0, parents=[], producer={})
        empty, useful = old.attempt(2, "rollout", "k"), old.attempt(2, "rollout", "k")
        useful.finish_shard(0, [useful.write_file("x", b"1")])
    with take_ownership(tmp_path, "second") as own:
        new = RunStore(tmp_path, epoch=own.epoch)
        running = new.attempt(2, "rollout", "k")
        assert new.sweep(steps=[2]) == 1
        assert new.sweep() == 1
    assert [a.folder.exists() for a in (done, rest, empty, useful, running)] == [True, False, False, True, True]
    new.verify(old_ref)
