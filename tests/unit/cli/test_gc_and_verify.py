"""``verl-omni gc`` and ``verl-omni verify``: what they print, what they refuse, and their exit codes."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.long_run import make_long_run
from verl_omni_core.cli import main
from verl_omni_core.cli.gc import size
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.lease import newest_epoch, take_ownership

STEPS = 6


def invoke(store: Path, *arguments: str):
    return CliRunner().invoke(main.app, [*arguments, "--store", str(store)])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_long_run(tmp_path, STEPS)
    return tmp_path


def files(store: Path) -> set[str]:
    return {str(path.relative_to(store)) for path in store.rglob("*") if path.is_file()}


def test_a_dry_run_says_what_would_go_in_bytes_and_changes_nothing(store):
    before = files(store)
    done = invoke(store, "gc", "long", "--dry-run", "--set", "durability.retention.trajectory_steps=2")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "long: 6 steps finished, newest snapshot that reads back: step 6"
    assert [line.split()[0] for line in lines[1:-1]] == ["embeddings,", "logprobs", "reference"]
    for line, count in zip(lines[1:-1], (8, 4, 4), strict=True):
        assert re.search(rf"steps 1-4 +{count} files .*durability\.retention\.trajectory_steps = 2", line), line
    total = int(re.fullmatch(r"would go: .* \((\d+) bytes\)", lines[-1]).group(1))
    tables = "trajectories", "embeddings", "logprobs", "reference"
    steps = [name for name in before if re.search("/steps/00000[1-4]/", name)]
    going = [name for name in steps if name.endswith(tuple(f"/{table}-00000.arrow" for table in tables))]
    assert len(going) == 16 and total == sum((store / name).stat().st_size for name in going)
    assert files(store) == before


def test_gc_deletes_what_it_says_and_the_second_time_nothing(store):
    before = files(store)
    asked = ("gc", "long", "--set", "durability.retention.trajectory_steps=2")
    planned, done, again = invoke(store, *asked, "--dry-run"), invoke(store, *asked), invoke(store, *asked)
    assert done.exit_code == again.exit_code == 0, done.output
    assert planned.stdout.replace("would go", "deleted") == done.stdout
    assert again.stdout.splitlines()[1:] == ["deleted: 0 B (0 bytes)"]
    gone = {name for name in before - files(store) if "epoch" not in name}
    assert len(gone) == 16 and all(int(name.split("/")[2]) <= 4 for name in gone)


def test_gc_sweeps_attempts_of_all_steps_that_nothing_came_of(store):
    with take_ownership(store / "long", "me") as own:
        attempt = RunStore(store / "long", epoch=own.epoch).attempt(2, "rollout", "key")
        attempt.write_file("x", bytes(1000))
    done = invoke(store, "gc", "long")
    line = next(line for line in done.stdout.splitlines() if line.startswith("  attempts"))
    assert re.search(r"step 2 +1 attempts +1\.\d kB +not committed", line)
    assert not attempt.folder.exists()


def test_a_run_that_lives_is_only_looked_at(store):
    asked = ("gc", "long", "--set", "durability.retention.trajectory_steps=2")
    with take_ownership(store / "long", "somebody") as own:
        attempt = RunStore(store / "long", epoch=own.epoch).attempt(7, "rollout", "key")
        before = files(store)
        refused = invoke(store, *asked)
        assert refused.exit_code == 1 and "owned by somebody" in refused.stderr
        looked = invoke(store, *asked, "--dry-run")
        assert looked.exit_code == 0 and "would go" in looked.stdout and "attempts" not in looked.stdout
        assert files(store) == before and attempt.folder.exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps=3", "gc takes settings of durability.retention only"),
        ("durability.retention.trajectory_step=3", "trajectory_steps"),
        ("durability.retention.media_share=2", "at most 1"),
    ],
)
def test_gc_refuses_other_and_impossible_settings(store, override, message):
    before = files(store)
    done = invoke(store, "gc", "long", "--set", override)
    assert done.exit_code == 2 and message in done.stderr and files(store) == before


def test_an_intact_run_ends_with_0_and_one_line(store):
    before = files(store)
    done = invoke(store, "verify", "long")
    assert done.exit_code == 0, done.output
    [line] = done.stdout.splitlines()
    assert line.startswith("long: intact (7 steps, 67 commits, 96 files of ") and line.endswith("6 ledger records)")
    assert files(store) == before


def test_a_damaged_run_ends_with_1_and_a_line_for_each_problem(store):
    root = store / "long"
    (root / "ledger" / f"{3:012d}.json").unlink()
    [table] = root.glob("steps/000002/reward/attempts/*/rewards-00000.arrow")
    table.unlink()
    (root / "run.json").write_text("{}")
    done = invoke(store, "verify", "long")
    assert done.exit_code == 1 and done.stderr == ""
    *problems, verdict = done.stdout.splitlines()
    assert len(problems) == 3 and all(problem.startswith("problem: ") for problem in problems)
    assert verdict.startswith("long: 3 problems (")


def test_a_lost_index_is_written_anew_when_asked_and_nobody_owns_the_run(tmp_path, monkeypatch):
    from verl_omni_core.store import index, verification

    for module in (index, verification):
        monkeypatch.setattr(module, "STEPS", 3)
    root = make_long_run(tmp_path, STEPS)
    (root / "index" / "000003.json").write_text("{")
    assert invoke(tmp_path, "verify", "long").exit_code == 1
    with take_ownership(root, "somebody"):
        refused = invoke(tmp_path, "verify", "long", "--rebuild-index")
    assert refused.exit_code == 1 and "owned by somebody" in refused.stderr
    done = invoke(tmp_path, "verify", "long", "--rebuild-index")
    assert done.exit_code == 0 and done.stdout.startswith("index: 2 blocks written anew\nlong: intact")


@pytest.mark.parametrize("command", ["gc", "verify"])
def test_a_run_that_is_not_there_ends_with_one_message(store, command):
    done = invoke(store, command, "none")
    assert done.exit_code == 1 and done.stderr.startswith("Error: ") and "no run 'none'; it has long" in done.stderr
    assert newest_epoch(store / "long") == 1


def test_bytes_are_shown_with_a_unit():
    assert [size(n) for n in (0, 999, 1000, 1_540_000, 2e15)] == ["0 B", "999 B", "1.0 kB", "1.5 MB", "2000.0 TB"]
