"""Runs that cannot go on: refused before anything starts, with what is wrong and the command for what was meant.

A refusal changes nothing on disk: names, sizes, times and contents of the whole store are compared.
"""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.stages.forked_run import tree
from tests.unit.training import tiny
from verl_omni_core.cli import main, train
from verl_omni_core.errors import StoreError, VerlOmniError
from verl_omni_core.settings.loader import load
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.opening import open_run
from verl_omni_core.store import artifacts, runs, trusted
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.lease import take_ownership
from verl_omni_core.store.ledger import Ledger
from verl_omni_core.workers.actor_rollout_ref import ActorRolloutRefWorker

PROFILE = "glyph-flow_grpo-ocr-cpu"
STEPS, SNAPSHOT = 3, 2


def asked(store: Path, *changes: str) -> list[str]:
    prompts = [f"data.{split}={store.parent / 'prompts.jsonl'}" for split in ("train", "validation")]
    base = [*prompts, f"run.store={store}", "run.id=begun", "run.steps=5", "model.lora.rank=4", "training.threads=1"]
    return [*base, "training.ema_decay=none", "durability.min_free_gb=0", *changes]


def settings(store: Path, *changes: str) -> RunConfig:
    return load(PROFILE, overrides=asked(store, *changes), environ={}).config


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that real ranks wrote: of the run's own network, of another rank, and of another model."""
    folder = tmp_path_factory.mktemp("snapshots")
    tiny.ADAPTER.build_tiny(str(folder / "tiny-sd3"), seed=0)
    made = {}
    for name, changes in {
        "own": (),
        "rank": ("model.lora.rank=8",),
        "model": (f"model.path={folder / 'tiny-sd3'}",),
    }.items():
        worker = ActorRolloutRefWorker(settings(folder / "runs", *changes))
        worker.init_model()
        worker.save_checkpoint(str(folder / name))
        made[name] = folder / name
    return made


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshots: dict[str, Path]) -> Path:
    """A store whose run ``begun`` made three steps, with a snapshot of the second."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a sign", "ground_truth": "sign"}\n' * 4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "surround", lambda *_, **__: pytest.fail("services were started"))
    folder = tmp_path / "runs"
    root = runs.create_run(folder, settings(folder).model_dump(mode="json"), code_version="1", run_id="begun").root
    with take_ownership(root, "somebody") as own:
        artifacts_, ledger = RunStore(root, epoch=own.epoch), Ledger(root, epoch=own.epoch)
        for step in range(STEPS + 1):
            for stage in ("plan", "update", "sync") if step else ("sync",):
                attempt = artifacts_.attempt(step, stage, "key")
                attempt.commit([attempt.write_file("x", b"x")], rows=1, parents=[], producer={})
            if step:
                ledger.append({"update_id": f"{step:06d}/0000", "step": step})
    snapshot(root, snapshots["own"])
    artifacts._manifest.cache_clear()
    return folder


def snapshot(root: Path, files: Path, **producer: str) -> None:
    """Commit a checkpoint, in place of the one that is there; ``producer`` says who made it, if not this run."""
    with take_ownership(root, "somebody") as own:
        attempt = RunStore(root, epoch=own.epoch).attempt(SNAPSHOT, "checkpoint", "key")
        (attempt.stage_folder / "COMMIT").unlink(missing_ok=True)
        for path in files.iterdir():
            shutil.copy(path, attempt.folder / path.name)
        records = [attempt.add_file(path.name) for path in files.iterdir()]
        attempt.commit(records, rows=1, parents=[], producer=producer)


def resume(store: Path, *changes: str):
    sets = [part for change in asked(store, *changes) for part in ("--set", change)]
    return CliRunner().invoke(main.app, ["train", PROFILE, *sets])


def refused(store: Path, *changes: str) -> str:
    """Return the one message of a refusal; nothing may have changed, also not by opening the run from Python."""
    before = tree(store.parent)
    done = resume(store, *changes)
    assert done.exit_code == 2 and done.stdout == "", done.output
    assert done.stderr.startswith("Error: ") and "Traceback" not in done.stderr
    with pytest.raises(VerlOmniError):
        open_run(settings(store, *changes))
    assert tree(store.parent) == before
    return " ".join(done.stderr.split())


def test_a_run_that_is_sound_passes_all_of_it(store, monkeypatch):
    started = []
    monkeypatch.setattr(train, "run_in_the_foreground", lambda config, *_: started.append(config) or "trained")
    before = tree(store.parent)
    assert resume(store).exit_code == 0 and started == [settings(store)]
    done = CliRunner().invoke(main.app, ["train", "--run-id", "begun", "--set", f"run.store={store}"])
    assert done.exit_code == 0 and started[1] == settings(store)
    assert tree(store.parent) == before


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def other_settings(path: Path) -> None:
    value = json.loads(path.read_text())
    value["config"]["training"]["learning_rate"] = 1
    path.write_text(json.dumps(value))


def file(*parts: str) -> Callable[[Path], Path]:
    return lambda root: root.joinpath(*parts)


def record(number: int) -> Callable[[Path], Path]:
    return file("ledger", f"{number:012d}.json")


def of(step: int, stage: str, name: str) -> Callable[[Path], Path]:
    return lambda root: next(root.glob(f"steps/{step:06d}/{stage}/{name}"))


DAMAGED = {
    "a torn run.json": (file("run.json"), cut, "run.json is damaged"),
    "settings that were edited": (file("run.json"), other_settings, "do not match their digest"),
    "another program's run.json": (file("run.json"), lambda path: path.write_text('{"x": 1}'), "lacks ['config'"),
    "a list in run.json": (file("run.json"), lambda path: path.write_text("[]"), "expected a JSON object"),
    "a folder that is no run": (file("run.json"), Path.unlink, "is not a run: it has no run.json"),
    "a torn record of an owner": (file("epoch", "2.json"), cut, "2.json is damaged"),
    "a torn marker": (of(STEPS, "sync", "COMMIT"), cut, "COMMIT is damaged"),
    "a manifest that is gone": (of(STEPS, "update", "attempts/*/manifest.json"), Path.unlink, "json is missing"),
    "a manifest that was edited": (of(STEPS, "plan", "attempts/*/manifest.json"), cut, "its COMMIT says"),
    "a ledger without its first record": (record(1), Path.unlink, "lacks record 1 of 3"),
    "a ledger without its second record": (record(2), Path.unlink, "lacks record 2 of 3"),
    "a ledger without its last record": (
        record(3),
        Path.unlink,
        "ends with step 2, but the update of step 3 is committed; restore the records from 3 on",
    ),
    "a torn record of the ledger": (record(3), cut, "ledger record 3 of run begun is damaged"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_corrupt_or_foreign_run_is_refused_with_what_is_wrong_with_it(store, what):
    find, damage, message = DAMAGED[what]
    damage(find(store / "begun"))
    assert message in refused(store)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_ledger_that_lacks_a_record_offers_a_fork_from_before_it(store, number):
    record(number)(store / "begun").unlink()
    assert "fork the run from a snapshot before that (verl-omni fork)" in refused(store)


def test_a_checkpoint_of_another_lora_rank_is_refused_with_both_ranks(store, snapshots):
    snapshot(store / "begun", snapshots["rank"], config_digest="of another run")
    message = refused(store)
    assert "does not fit this trainer: r = 8 there, this trainer has r = 4" in message
    assert "Use the settings that it was written with" in message


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(store, snapshots):
    snapshot(store / "begun", snapshots["model"], config_digest="of another run")
    message = refused(store)
    assert re.search(r"does not fit this trainer: .*num_attention_heads = 2 there, this trainer has", message)


def test_a_damaged_checkpoint_is_left_to_whoever_restores_from_the_one_before(store, monkeypatch):
    monkeypatch.setattr(train, "run_in_the_foreground", lambda *_: "trained")
    cut(next((store / "begun").glob(f"steps/{SNAPSHOT:06d}/checkpoint/attempts/*/checkpoint.json")))
    artifacts._manifest.cache_clear()

    trusted._trusted.clear()
    assert resume(store).exit_code == 0


def test_settings_that_change_results_are_spelled_out_with_the_command_that_forks(store):
    message = refused(store, "training.learning_rate=1e-3", "sampler.noise_level=0.5", "algorithm.kl_coef=0.1")
    assert "algorithm.kl_coef = 0.0, and now it is 0.1" in message
    assert "sampler.noise_level = 0.7, and now it is 0.5" in message
    assert "training.learning_rate = 0.0006, and now it is 0.001" in message
    command = message[message.index("verl-omni fork") :]
    done = CliRunner().invoke(main.app, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    (made,) = [run for run in runs.list_runs(store) if run.lineage]
    assert made.lineage == f"begun@{SNAPSHOT}" and made.steps_done == SNAPSHOT
    config = runs.open_run(store, made.run_id).config
    assert config["training"]["learning_rate"] == 1e-3 and config["algorithm"]["kl_coef"] == 0.1
    printed = re.search(r"start it: verl-omni (.*)", done.stdout)
    assert printed and shlex.split(printed[1]) == ["train", "--run-id", made.run_id, "--set", f"run.store={store}"]


def test_settings_that_the_snapshot_cannot_serve_are_spelled_out_without_a_fork(store):
    message = refused(store, "model.lora.rank=8", "training.learning_rate=1e-3")
    assert "model.lora.rank = 4, and now it is 8" in message and "give run.id another value" in message
    assert "verl-omni fork" not in message


@pytest.mark.parametrize(
    "change",
    ['reward.scorers=[{name="ocr", weight=0.5}]', 'model.lora.exclude=["proj_out"]', "data.shuffle=false"],
)
def test_any_setting_survives_the_way_into_the_command(store, change):
    message = refused(store, change)
    if "lora" in change:
        return
    command = shlex.split(message[message.index("verl-omni fork") :])
    done = CliRunner().invoke(main.app, command[1:])
    assert done.exit_code == 0, done.output
    (made,) = [run for run in runs.list_runs(store) if run.lineage]
    forked = runs.open_run(store, made.run_id).config
    wanted = settings(store, change).model_dump(mode="json")
    assert {**forked, "run": None} == {**wanted, "run": None}


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """Put a copy of a folder on a file system that is mounted read-only; root writes everywhere else."""
    place = tmp_path / "mounted"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "tmpfs", place], capture_output=True, timeout=20, check=False
    ).returncode:
        pytest.skip("this user may not mount a file system")

    def mounted(folder: Path) -> Path:
        shutil.copytree(folder, place / "runs", symlinks=True)
        subprocess.run(["mount", "-o", "remount,ro", place], timeout=20, check=True)
        return place / "runs"

    yield mounted
    subprocess.run(["umount", place], timeout=20, check=True)


@pytest.mark.parametrize("run_id", ["begun", "another"])
def test_a_store_on_a_read_only_file_system_is_refused(store, read_only, run_id):
    message = refused_at(read_only(store), f"run.id={run_id}")
    assert "cannot be written (the file system is mounted read-only); choose a run.store" in message


@pytest.fixture
def immutable(store: Path) -> Iterator[Callable[[Path], None]]:
    """Forbid even root to make files in a folder."""
    fixed: list[Path] = []

    def fix(folder: Path) -> None:
        if subprocess.run(["chattr", "+i", folder], capture_output=True, timeout=20, check=False).returncode:
            pytest.skip("this file system has no immutable folders")
        fixed.append(folder)

    yield fix
    for folder in fixed:
        subprocess.run(["chattr", "-i", folder], timeout=20, check=True)


@pytest.mark.parametrize("inside", ["", "begun", "begun/steps", "begun/ledger", "begun/epoch"])
def test_a_store_that_this_user_may_not_write_is_refused(store, immutable, inside):
    immutable(store / inside)
    message = refused(store)
    assert f"{(store / inside)} cannot be written (permission denied)" in message


def test_a_fork_into_a_store_that_cannot_be_written_is_refused(store, immutable):
    immutable(store)
    before = tree(store.parent)
    done = CliRunner().invoke(main.app, ["fork", "begun", "--store", str(store)])
    assert done.exit_code == 2 and "cannot be written" in done.stderr
    assert tree(store.parent) == before


def refused_at(store: Path, *changes: str) -> str:
    """As :func:`refused`, for a store whose prompts lie elsewhere."""
    before = tree(store)
    prompts = [f"data.{split}={store.parent.parent / 'prompts.jsonl'}" for split in ("train", "validation")]
    done = resume(store, *prompts, *changes)
    assert done.exit_code == 2 and done.stdout == "", done.output
    assert tree(store) == before
    return " ".join(done.stderr.split())


def test_an_owner_that_lives_is_no_fault_of_the_input(store):
    with take_ownership(store / "begun", "somebody else"):
        done = resume(store)
    assert done.exit_code == 1 and "owned by somebody else" in done.stderr


def test_a_fork_of_a_ledger_with_a_gap_goes_on_from_a_snapshot(store):
    record(3)(store / "begun").unlink()
    done = CliRunner().invoke(main.app, ["fork", "begun", "--store", str(store), "--run-id", "rescued"])
    assert done.exit_code == 0, done.output
    made = runs.open_run(store, "rescued")
    assert made.lineage is not None and made.lineage.step == SNAPSHOT
    with pytest.raises(StoreError):
        runs.open_run(store, "nowhere")
