"""Faults around a run: its disk, the Prefect server, a second flow, a stage delivered twice, SIGTERM."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.cases import SURROUNDINGS
from tests.faults.injected import planned
from tests.faults.injected.planned import Fault
from tests.faults.page import Outcome
from tests.faults.proof import assert_nothing_lost_or_doubled
from tests.faults.size import PACKS
from tests.faults.subject import Subject
from verl_omni_core.cluster import prefect_server, services
from verl_omni_core.store.attempt import SHARDS
from verl_omni_core.store.lease import is_owned
from verl_omni_core.store.runs import list_runs

pytestmark = [pytest.mark.engine, pytest.mark.faults, pytest.mark.full, pytest.mark.timeout(1200)]

DISK_MB = 64
GONE_S = 60.0


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of its own in memory, to be filled."""
    folder = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True, timeout=30).returncode:
        pytest.skip("only root may mount the small file system that these cases fill")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)


@pytest.fixture(scope="module")
def run(subject_of: Callable[..., Subject], small_disk: Path) -> Subject:
    return subject_of("surroundings", store=small_disk / "runs")


def _refuse_a_second_flow(run: Subject) -> float:
    """Start a second flow on the run while the first one is in its first step; returns when that one went on."""
    first = run.starts[-1]
    run.wait_for(lambda: _is_struck(run, 0))
    second = run.start_beside()
    assert second.wait() == 1
    assert "FencedError" in second.output() and f"process {first.process.pid} " in second.output()
    run.starts.remove(second)
    resumed = time.time()
    planned.resume(run.plan, 0)
    return resumed


def _fill_the_disk(run: Subject) -> float:
    """Fill the disk as the second rollout begins, see the flow fail, and make room; returns when that was."""
    run.wait_for(lambda: _is_struck(run, 1))
    filler = run.root.parent / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(filler).free - 64 * 1024)
    planned.resume(run.plan, 1)
    assert run.starts[-1].wait() == 1, run.starts[-1].output()
    assert "StoreError" in run.starts[-1].output() and "free some space" in run.starts[-1].output()
    filler.unlink()
    return time.time()


def _terminate_in_mid_rollout(run: Subject) -> float:
    """Send SIGTERM to the flow when all packs but one are finished; returns when that was."""
    rollout = {"step": 2, "stage": "rollout"}
    started = run.start(Fault("pack", "hang", {**rollout, "shard": PACKS - 1}))
    attempts = run.root / "steps" / "000002" / "rollout" / "attempts"
    run.wait_for(lambda: len(list(attempts.glob(f"*/{SHARDS}/*.json"))) == PACKS - 1)
    struck = time.time()
    started.process.send_signal(signal.SIGTERM)
    assert started.wait() != 0
    assert not is_owned(run.root) and [each.status for each in list_runs(run.root.parent)] == ["stopped"]
    return struck


def _is_struck(run: Subject, number: int) -> bool:
    return planned.struck(run.plan, number) is not None


def _start_prefect(command: list[str] | None = None, address: str = "") -> str:
    """Start a Prefect server, or one that ended by its command, and return its address."""
    if command is None:
        return prefect_server.wait(prefect_server.launch())
    environment = {**prefect_server.environment(), "PREFECT_UI_API_URL": address}
    return prefect_server.wait(services.launch(prefect_server.NAME, command, address, environment))


def _delete_prefect(run: Subject) -> float:
    """Kill the flow, throw the Prefect server away with its database, and start a new one."""
    struck = run.killed_at(Fault("commit.done", where={"step": 2, "stage": "update"}))
    services.stop(prefect_server.NAME)
    shutil.rmtree(services.home() / "prefect")
    run.environment["PREFECT_API_URL"] = os.environ["PREFECT_API_URL"] = _start_prefect()
    return struck


def _stop_prefect_for_a_minute(run: Subject) -> float:
    """Stop the Prefect server as the third rollout begins; returns when that was."""
    started = run.start(Fault("attempt.begun", "pause", {"step": 3, "stage": "rollout"}))
    run.wait_for(lambda: _is_struck(run, 0))
    server = services.find(prefect_server.NAME)
    assert server is not None
    command = psutil.Process(server.pid).cmdline()
    services.stop(prefect_server.NAME)
    gone = time.time()
    planned.resume(run.plan, 0)
    run.wait_for(lambda: time.time() > gone + GONE_S or started.process.poll() is not None)
    _start_prefect(command, server.address)
    assert started.wait() == 0, started.output()
    return gone


@pytest.fixture(scope="module")
def outcomes(run: Subject, outcome_of: Callable[..., Outcome]) -> dict[str, Outcome]:
    struck = {}
    run.start(
        Fault("attempt.begun", "pause", {"step": 1, "stage": "reward"}),
        Fault("attempt.begun", "pause", {"step": 2, "stage": "rollout"}),
        twice=True,
    )
    struck["second-flow"] = _refuse_a_second_flow(run)
    struck["disk-full"] = _fill_the_disk(run)
    struck["sigterm"] = _terminate_in_mid_rollout(run)
    struck["prefect-deleted"] = _delete_prefect(run)
    struck["prefect-gone"] = _stop_prefect_for_a_minute(run)
    assert_nothing_lost_or_doubled(run.recorded, run.config)
    happened = {
        "second-flow": "the second one was refused with who owns the run; the first one went on",
        "disk-full": "the flow ended with how much is free and what to do; with room again, the next one went on",
        "sigterm": "the flow let go of the run; the next one took over the finished packs and drew the other",
        "prefect-deleted": "the next flow, against a new database, went on at the next stage",
        "prefect-gone": "the flow went on without it",
    }
    made = {case: outcome_of(run, case, at, happened[case]) for case, at in struck.items()}
    first = next(event["time"] for event in run.starts[0].events() if event["what"] == "commit")
    twice = outcome_of(run, "stages-twice", first, "the second delivery answered what the first one had committed")
    return {**made, "stages-twice": twice}


@pytest.mark.parametrize("case", SURROUNDINGS)
def test_the_final_weights_are_those_of_a_run_that_met_no_fault(outcomes: dict[str, Outcome], case: str) -> None:
    assert outcomes[case].equal


def test_only_the_unfinished_pack_is_drawn_after_sigterm(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["sigterm"].packs == 1
