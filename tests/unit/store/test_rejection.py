"""A result that turned out wrong is taken back, with all that stands on it, and nothing else."""

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from verl_omni_core.errors import FencedError, StoreError
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.lease import take_ownership
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.store.places import REJECTED
from verl_omni_core.store.rejection import reject, reject_step


@pytest.fixture
def store(tmp_path) -> RunStore:
    return RunStore(tmp_path)


def commit(store: RunStore, stage: str, *parents: ArtifactRef, step: int = 2) -> ArtifactRef:
    attempt = store.attempt(step, stage, "k", parents=parents)
    file = attempt.write_table("rows", 0, pa.table({"sample_index": pa.array([0], pa.int64())}))
    attempt.finish_shard(0, [file])
    return attempt.commit([file], rows=1, parents=list(parents), producer={})


def test_rejecting_a_stage_takes_back_its_descendants_and_keeps_its_parents_and_other_steps(store):
    before = commit(store, "update", step=1)
    planned = commit(store, "plan")
    drawn = commit(store, "rollout", planned, before)
    scored = commit(store, "reward", planned, drawn)
    compared = commit(store, "advantage", scored)
    taken_back = reject(store, drawn, "drawn by another policy")
    assert taken_back[-1] == drawn and set(taken_back) == {drawn, scored, compared}
    assert taken_back.index(compared) < taken_back.index(scored)
    assert store.find(2, "plan") == planned and store.find(1, "update") == before
    for ref in taken_back:
        assert store.committed(2, ref.stage, "k") is None
        folder = Path(store.root) / "steps" / "000002" / ref.stage / "attempts" / ref.attempt
        note = json.loads((folder / REJECTED).read_text())
        assert note["reason"] == "drawn by another policy" and note["attempt"] == ref.attempt


def test_a_rejected_stage_is_produced_anew_and_its_shards_are_not_taken_over(store):
    drawn = commit(store, "rollout")
    reject(store, drawn, "wrong")
    assert store.finished_shards(2, "rollout", "k") == {}
    again = commit(store, "rollout")
    assert again.attempt != drawn.attempt and store.committed(2, "rollout", "k") == again
    with pytest.raises(StoreError, match="was to be rejected"):
        reject(store, drawn, "wrong")
    assert store.committed(2, "rollout", "k") == again


def test_only_the_owner_rejects(tmp_path):
    old = take_ownership(tmp_path, "a")
    drawn = commit(RunStore(tmp_path, epoch=old.epoch), "rollout")
    old.release()
    new = take_ownership(tmp_path, "b")
    with pytest.raises(FencedError):
        reject(RunStore(tmp_path, epoch=old.epoch), drawn, "wrong")
    assert RunStore(tmp_path, epoch=new.epoch).find(2, "rollout") == drawn
    new.release()


def test_a_step_is_taken_back_newest_first_whatever_came_of_what_and_twice_is_once(store):
    kept = commit(store, "update", step=1)
    made = [commit(store, stage) for stage in ("plan", "rollout", "update", "sync")]
    for age, ref in enumerate(made):  # commits of one instant have no order
        os.utime(Path(store.root) / "steps" / "000002" / ref.stage / "COMMIT", (age, age))
    assert reject_step(store, 2, "back to step 1") == made[::-1]
    assert reject_step(store, 2, "back to step 1") == []
    assert all(store.find(2, ref.stage) is None for ref in made) and store.find(1, "update") == kept
    for ref in made:
        folder = Path(store.root) / "steps" / "000002" / ref.stage / "attempts" / ref.attempt
        assert json.loads((folder / REJECTED).read_text())["reason"] == "back to step 1"
    again = commit(store, "rollout")
    assert reject_step(store, 2, "again") == [again]


def test_a_step_is_taken_back_by_the_owner_alone_and_without_its_files_too(tmp_path):
    own = take_ownership(tmp_path, "a")
    drawn = commit(RunStore(tmp_path, epoch=own.epoch), "rollout")
    shutil.rmtree(tmp_path / "steps" / "000002" / "rollout" / "attempts" / drawn.attempt)
    own.release()
    newer = take_ownership(tmp_path, "b")
    with pytest.raises(FencedError):
        reject_step(RunStore(tmp_path, epoch=own.epoch), 2, "late")
    assert reject_step(RunStore(tmp_path, epoch=newer.epoch), 2, "mine") == [drawn]
    newer.release()
