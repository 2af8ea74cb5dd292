"""From a clone to a better model with one command."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_omni_core.cluster import prefect_server, ray_head, services

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
LIMIT_S = 15 * 60


def test_fresh_clone_trains_with_one_command_in_15_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone, home = tmp_path / "clone", tmp_path / "home"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True, timeout=120)
    monkeypatch.setenv("VERL_OMNI_HOME", str(home))
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "PREFECT_API_URL")}
    started = time.monotonic()
    try:
        done = subprocess.run(
            ["make", "demo"], cwd=clone, env=environment, capture_output=True, text=True, timeout=LIMIT_S + 300
        )
    finally:
        for name in (ray_head.NAME, prefect_server.NAME):
            services.stop(name)
    seconds = time.monotonic() - started
    sys.stderr.write(done.stdout + done.stderr)
    assert done.returncode == 0
    assert seconds <= LIMIT_S
    found = re.search(r"interval ([+-][\d.]+) to", done.stdout)
    assert found is not None and float(found[1]) > 0.05
