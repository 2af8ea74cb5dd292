"""The benchmark of what durability costs runs at a small scale and says what it promises."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240


def lines(folder: Path, *parts: str) -> dict[str, dict[str, Any]]:
    """Return what a small measurement prints: by part, or by benchmark for what a part rests on."""
    command = [sys.executable, "-m", "benchmarks.overhead", "--small", "--folder", str(folder), "--parts", *parts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert list(folder.iterdir()) == []
    return {line.get("part", line["benchmark"]): line for line in printed}


def test_commit_and_opening_are_measured_against_their_bounds(tmp_path):
    found = lines(tmp_path, "commit", "open")
    assert found.keys() == {"arrow_commit", "commit", "open"}
    for part, bound in (("commit", 1.0), ("open", 2.0)):
        line = found[part]
        assert (line["benchmark"], line["bound"], line["unit"]) == ("overhead", bound, "s")
        assert line["value"] > 0 and line["holds"] is (line["value"] <= bound)
    assert found["commit"]["value"] == found["arrow_commit"]["commit_s"]
    assert found["commit"]["bytes"] > 16 * 64 * 64 * 4 * 3 * 512  # fp32 latents of three steps of 512 samples
    assert found["open"]["steps"] == 200 and found["open"]["without_index_s"] > 0


@pytest.mark.full
@pytest.mark.engine
def test_the_drivers_memory_is_measured_over_steps_as_prefect_tasks(tmp_path):
    found = lines(tmp_path, "memory")
    line, of = found["driver_memory"], found["noop_steps"]
    assert (line["steps"], line["bound"], line["unit"]) == (30, 50_000_000, "bytes")
    assert line["value"] == of["spread_bytes"] >= 0 and of["bytes_after_warm_up"] > 50_000_000
    assert line["holds"] is True
