"""Bits that flip and files that are cut: in shards and in checkpoints."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.injected.planned import Fault
from tests.faults.page import Outcome
from tests.faults.proof import assert_nothing_lost_or_doubled
from tests.faults.size import PACKS
from tests.faults.subject import Subject, flip_bit, truncate

pytestmark = [pytest.mark.engine, pytest.mark.faults, pytest.mark.full, pytest.mark.timeout(1200)]

CASES = (
    *("finished-shard-cut", "committed-shard-flipped", "committed-shard-cut", "checkpoint-flipped", "checkpoint-cut"),
)


def _committed(run: Subject, name: str) -> Path:
    """Return a file of the second step's committed rollout."""
    return run.root / "steps" / "000002" / "rollout" / "attempts" / run.recorded.ref(2, "rollout").attempt / name


def _refused(run: Subject, path: Path, damage: Callable[[Path], None]) -> tuple[float, bytes]:
    """Damage a file that the run needs and see the next flow refuse it; returns when that was, and the intact file."""
    intact, commits, ledger = path.read_bytes(), run.recorded.commits(), sorted((run.root / "ledger").iterdir())
    damage(path)
    refused = run.start()
    assert refused.wait() == 1
    assert "StoreError" in refused.output() and path.name in refused.output() and "restore" in refused.output()
    assert sorted((run.root / "ledger").iterdir()) == ledger
    assert {name: run.recorded.commits()[name] for name in commits} == commits
    return time.time(), intact


def _without_trainer(run: Subject, damage: Callable[[Path], None]) -> tuple[float, Path, bytes]:
    """Damage the newest checkpoint's largest file once all actors have ended."""
    run.end()
    path = max(run.shard_files(2, "checkpoint", "*"), key=lambda path: path.stat().st_size)
    intact = path.read_bytes()
    damage(path)
    return time.time(), path, intact


@pytest.fixture(scope="module")
def outcomes(subject_of: Callable[..., Subject], outcome_of: Callable[..., Outcome]) -> dict[str, Outcome]:
    run, struck = subject_of("damage"), {}
    run.killed_at(Fault("commit.ready", where={"step": 2, "stage": "rollout"}))
    (shard,) = run.shard_files(2, "rollout", "media-00002.arrow")
    truncate(shard)
    struck["finished-shard-cut"] = time.time()
    run.killed_at(Fault("commit.done", where={"step": 2, "stage": "rollout"}))
    packs = {"finished-shard-cut": run.packs_drawn_again(struck["finished-shard-cut"])}
    # `reward` reads pictures in the flow's process, `old_log_probs` trajectories in a rank's
    struck["committed-shard-cut"], _ = _refused(run, _committed(run, "media-00001.arrow"), truncate)
    run.killed_at(Fault("commit.done", where={"step": 2, "stage": "reward"}), resume=1)
    packs["committed-shard-cut"] = run.drawn_by(2, "rollout").count(run.recorded.ref(2, "rollout").attempt)
    trajectories = _committed(run, "trajectories-00001.arrow")
    struck["committed-shard-flipped"], intact = _refused(run, trajectories, flip_bit)
    trajectories.write_bytes(intact)
    run.killed_at(Fault("commit.done", where={"step": 2, "stage": "checkpoint"}))
    struck["checkpoint-flipped"], path, intact = _without_trainer(run, flip_bit)
    run.killed_at(Fault("commit.done", where={"step": 3, "stage": "update"}))
    path.write_bytes(intact)
    struck["checkpoint-cut"], _, _ = _without_trainer(run, truncate)
    run.finish()
    assert_nothing_lost_or_doubled(run.recorded, run.config, damaged=[(2, "checkpoint")])
    refused = "refused with the file's name, nothing was changed;"
    passed_over = "passed over for the one before it, and the committed batches after that were trained again"
    happened = {"finished-shard-cut": "the next flow drew that pack again and took over the others"}
    happened["committed-shard-flipped"] = f"{refused} the file was restored from a copy"
    happened["committed-shard-cut"] = f"{refused} with `run.resume = 1` the step was done anew"
    happened |= dict.fromkeys(("checkpoint-flipped", "checkpoint-cut"), passed_over)
    return {case: outcome_of(run, case, at, happened[case], packs=packs.get(case)) for case, at in struck.items()}


@pytest.mark.parametrize("case", CASES)
def test_the_final_weights_are_those_of_a_run_that_met_no_fault(outcomes: dict[str, Outcome], case: str) -> None:
    assert outcomes[case].equal


def test_a_finished_pack_that_is_cut_is_drawn_again_and_no_other(outcomes: dict[str, Outcome]) -> None:
    packs = {case: outcome.packs for case, outcome in outcomes.items() if outcome.packs}
    assert packs == {"finished-shard-cut": 1, "committed-shard-cut": PACKS}
