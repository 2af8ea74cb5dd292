"""What ends a flow that is started again and again without getting on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.crash_loop import STARTS
from tests.flows.test_resume import LIMIT_S, ROOT
from verl_omni_core.store.lease import newest_epoch

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.timeout(400)]


def test_flow_runs_beyond_the_budget_end_failed_with_the_reason_and_without_a_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.flows.crash_loop", str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    states = json.loads(done.stdout.splitlines()[-1])
    assert len(states) == STARTS and {kind for kind, _ in states} == {"FAILED"}
    assert all("EngineError" in message for _, message in states[:3])
    for _, message in states[3:]:
        assert "NoProgressError" in message and "started 3 times in a row" in message
        assert "the only GPU fell off the bus" in message and "--set durability.no_progress_budget=6" in message
    assert newest_epoch(tmp_path / "runs" / "a") == 3
