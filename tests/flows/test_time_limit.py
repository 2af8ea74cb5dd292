"""A flow run that stops because its machine's time ends, and the run that goes on after it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.conftest import Ran
from tests.flows.test_resume import LIMIT_S, ROOT, quick_settings
from verl_omni_core.online import train
from verl_omni_core.stages.ending import end_run
from verl_omni_core.store.runs import list_runs

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture
def runs(home: Path, tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    end_run("a", tmp_path)


def test_a_flow_run_that_stops_in_time_is_completed_as_stopped_and_goes_on_where_it_was(runs: Path) -> None:
    command = [sys.executable, "-m", "tests.flows.stopped", str(runs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["name"], told["completed"], told["stopped_early"]) == ("Stopped", True, True)
    assert "stopped after step 1 of 2" in told["result"]
    assert [(run.status, run.steps_done) for run in list_runs(runs)] == [("stopped", 1)]
    ran = Ran(quick_settings(runs, run__steps=2), "")
    assert ran.recorded.manifest(1, "checkpoint").producer["weights_version"] == 1
    before = ran.recorded.commits()
    ran.summary = train(ran.config)
    after = ran.recorded.commits()
    assert {path: after[path] for path in before} == before
    assert [(run.status, run.steps_done) for run in list_runs(runs)] == [("finished", 2)]
