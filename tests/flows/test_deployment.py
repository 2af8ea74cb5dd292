"""The recipe of docs/running.md: a worker runs a deployment of the flow on the standing server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows import small
from tests.flows.conftest import Ran
from tests.project.collected import ROOT
from verl_omni_core.cluster.start import start
from verl_omni_core.settings.run import ClusterSettings

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.timeout(900)]

LIMIT_S = 300


def _prefect(*arguments: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_a_worker_runs_the_online_deployment(home: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PREFECT_API_URL", "PREFECT_HOME"):
        monkeypatch.setenv(name, "")  # restored afterwards, as is what the start sets
        monkeypatch.delenv(name)
    surroundings = start(ClusterSettings(), with_prefect=True, say=lambda line: None)
    # a user's shell has the server's address alone, and another PREFECT_HOME
    url, folder = str(surroundings.prefect_url), str(home / "client")
    environment = {**os.environ, "PREFECT_API_URL": url, "PREFECT_HOME": folder}
    ran = Ran(small.settings("deployed", store), "")
    config = json.dumps(small.settings("unnamed", store).model_dump(mode="json"))
    _prefect("work-pool", "create", "gpu-host", "--type", "process", environment=environment)
    _prefect("--no-prompt", "deploy", "--all", environment=environment)
    worker = subprocess.Popen(
        [sys.executable, "-m", "prefect", "worker", "start", "--pool", "gpu-host"], cwd=ROOT, env=environment
    )
    try:
        changes = json.dumps(["run.id=deployed", "run.steps=1", "run.images_every=0"])
        parameters = ["--param", f"config={config}", "--param", f"overrides={changes}"]
        watched = ["--watch", "--watch-timeout", str(LIMIT_S - 30)]
        _prefect("deployment", "run", "online/online", *parameters, *watched, environment=environment)
        assert ran.recorded.metrics(1)["training/global_step"] == 1
        assert ran.requests() == [ran.recorded.samples_drawn()]
        watched_teardown = ["--param", "run_id=deployed", "--param", f"store={store}", *watched]
        _prefect("deployment", "run", "teardown/teardown", *watched_teardown, environment=environment)
    finally:
        worker.terminate()
        try:
            worker.wait(60)
        except subprocess.TimeoutExpired:  # a worker may take its time; what it ran is judged above
            worker.kill()
            worker.wait(10)
        ran.end()
