"""A check of a whole run finds each kind of damage, says what to do, and changes nothing."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.long_run import make_long_run, unsynced
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.retention import Policy, remove, wanted
from verl_omni_core.store import index, verification
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.index_files import block_path
from verl_omni_core.store.lease import take_ownership
from verl_omni_core.store.rejection import reject
from verl_omni_core.store.verification import verify_run
from verl_omni_core.training.checkpoint import INDEX_FILE

STEPS = 12


@pytest.fixture(scope="module", autouse=True)
def short_blocks() -> Iterator[None]:
    """Blocks of ten steps instead of a hundred."""
    with mock.patch.object(index, "STEPS", 10), mock.patch.object(verification, "STEPS", 10):
        yield


@pytest.fixture(scope="module")
def made(short_blocks: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a block of the index and two steps more, with a settings file and a checkpoint that lists its files."""
    root = make_long_run(tmp_path_factory.mktemp("long"), STEPS)
    (root / "settings").mkdir()
    value = json.loads((root / "run.json").read_text())
    (root / "settings" / "000001.json").write_text(json.dumps(value))
    with take_ownership(root, "me") as own:
        attempt = RunStore(root, epoch=own.epoch).attempt(STEPS + 1, "checkpoint", "key")
        state = attempt.write_file("state.safetensors", b"weights")
        listed = {state.name: {"size_bytes": state.size_bytes, "sha256": state.sha256}}
        own_list = attempt.write_file(INDEX_FILE, json.dumps({"format": 1, "files": listed}).encode())
        attempt.commit([state, own_list], rows=2, parents=[], producer={})
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "long"))


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def attempt_of(root: Path, step: int, stage: str) -> Path:
    [folder] = (root / "steps" / f"{step:06d}" / stage / "attempts").iterdir()
    return folder


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def rewrite(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_an_intact_run_is_counted_and_left_as_it_is(made):
    before = contents(made)
    told: list[tuple[int, int, int, int]] = []
    found = verify_run(made, lambda *numbers: told.append(numbers))
    assert (found.problems, found.notes) == ([], [])
    assert (found.steps, found.records, found.collected) == (STEPS + 2, STEPS, 0)
    assert found.commits == STEPS * 11 + 2
    assert told[-1] == (found.files, found.files, found.bytes, found.bytes) and len(told) == found.files
    assert contents(made) == before


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of a table": (lambda r: flip(attempt_of(r, 3, "rollout") / "media-00000.arrow"), "sha256"),
    "a table cut": (lambda r: (attempt_of(r, 3, "rollout") / "media-00000.arrow").write_bytes(b"x"), "has 1 bytes"),
    "a table lost": (lambda r: (attempt_of(r, 3, "rollout") / "media-00000.arrow").unlink(), "no file"),
    "a bit of a manifest": (lambda r: flip(attempt_of(r, 3, "reward") / "manifest.json"), "torn or was changed"),
    "a manifest lost": (lambda r: (attempt_of(r, 3, "log") / "manifest.json").unlink(), "is missing"),
    "a COMMIT damaged": (lambda r: (r / "steps/000003/log/COMMIT").write_text("{"), "COMMIT is damaged"),
    "a COMMIT of another stage": (lambda r: rewrite(r / "steps/000003/log/COMMIT", step=4), "its COMMIT is of"),
    "a COMMIT lost": (lambda r: (r / "steps/000003/advantage/COMMIT").unlink(), "where nothing whole is committed"),
    "a log lost": (lambda r: (r / "steps/000003/log/COMMIT").unlink(), "steps 3 to 3 have no committed 'log'"),
    "a record lost": (lambda r: (r / "ledger" / f"{5:012d}.json").unlink(), "lacks record 5"),
    "the last record lost": (lambda r: (r / "ledger" / f"{STEPS:012d}.json").unlink(), "1 steps, the first 12"),
    "a record changed": (lambda r: rewrite(r / "ledger" / f"{5:012d}.json", step=9), "record 5 .* is damaged"),
    "the settings": (lambda r: rewrite(r / "run.json", config={}), "run.json has settings that do not match"),
    "later settings": (lambda r: (r / "settings/000001.json").write_text("["), "000001.json is missing or damaged"),
    "an owner": (lambda r: (r / "epoch/1.json").write_text("{"), "epoch has a damaged entry"),
    "a block": (lambda r: flip(block_path(r, 10)), "--rebuild-index"),
    "a note": (lambda r: (attempt_of(r, 3, "rollout") / "collected.json").write_text("{"), "collected.json is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_each_kind_of_damage_is_told_in_a_line_that_says_what_to_do(root, what):
    damage, told = DAMAGE[what]
    damage(root)
    before = contents(root)
    found = verify_run(root)
    assert found.problems

    assert any(re.search(told, problem) for problem in found.problems), found.problems
    for problem in found.problems:
        assert "\n" not in problem
        assert re.search(r"restore|verl-omni (verify|gc|export)", problem), problem
    assert contents(root) == before


def test_a_checkpoint_whose_own_list_differs_from_its_manifest_is_told(tmp_path):
    with unsynced():
        root = make_long_run(tmp_path, 1)
        with take_ownership(root, "me") as own:
            attempt = RunStore(root, epoch=own.epoch).attempt(2, "checkpoint", "key")
            listed = {"state.safetensors": {"size_bytes": 1, "sha256": "0"}}
            file = attempt.write_file(INDEX_FILE, json.dumps({"files": listed}).encode())
            attempt.commit([file], rows=1, parents=[], producer={})
    [problem] = verify_run(root).problems
    assert "and the manifest beside it disagree on state.safetensors" in problem


def test_the_name_of_a_checkpoints_own_list_is_the_trainers():
    assert verification.CHECKPOINT_INDEX == INDEX_FILE


def test_what_stands_on_a_result_that_was_taken_back_alone_is_told(root):
    with take_ownership(root, "me") as own:
        store = RunStore(root, epoch=own.epoch)
        reject(store, store.find(5, "update"), "wrong")
    problems = verify_run(root).problems
    assert any("step 6, rollout: it was computed from" in problem for problem in problems)


def test_a_lost_index_is_a_note_and_no_problem(root):
    shutil.rmtree(root / "index")
    found = verify_run(root)
    assert found.problems == []
    [note] = found.notes
    assert note.startswith("1 of 1 blocks of the index are not there")
    assert note.endswith("verl-omni verify long --rebuild-index writes it anew")


def test_files_that_retention_deleted_count_as_deleted_and_those_it_left_over_are_noted(root):
    run = RunConfig.model_validate({"durability": {"retention": {"trajectory_steps": 2, "checkpoints": None}}})
    kept = attempt_of(root, 7, "rollout") / "trajectories-00000.arrow"
    data = kept.read_bytes()
    with take_ownership(root, "me") as own:
        policy = Policy(RunStore(root, epoch=own.epoch), run, "uuid", STEPS)
        remove(policy, wanted(policy))
    found = verify_run(root)
    assert (found.problems, found.notes, found.collected) == ([], [], 4 * (STEPS - 2))
    kept.write_bytes(data)  # as if the power had failed before it was gone
    found = verify_run(root)
    assert (found.problems, found.collected) == ([], 4 * (STEPS - 2))
    assert found.notes == ["1 files that retention let go are still there; verl-omni gc long deletes them"]
