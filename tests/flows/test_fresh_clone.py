"""From a clone to a better model with one command."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.memory import Sampler, services_here
from verl_omni_core.cluster import prefect_server, ray_head, services

ROOT = Path(__file__).parents[2]
LIMIT_S = 15 * 60
SUMMARY = (
    r"Run: +\S+, (?P<steps>\d+) steps",
    r"Held-out reward: +(?P<before>[\d.]+) before, (?P<after>[\d.]+) after training \(128 prompts, 4 fixed seeds",
    r"Gain: +(?P<gain>[+-][\d.]+), paired bootstrap 95 % interval (?P<low>[+-][\d.]+) to",
    r"Before and after: +(?P<picture>\S+)",
    r"Report: +(?P<report>\S+)",
)


def _told(output: str) -> dict[str, str]:
    """Return the numbers and paths of the summary."""
    found = [re.search(rf"^{line}", output, re.MULTILINE) for line in SUMMARY]
    assert all(found), output[-4000:]
    return {name: text for match in found if match for name, text in match.groupdict().items()}


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_fresh_clone_trains_with_one_command_in_15_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone, home = tmp_path / "clone", tmp_path / "home"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True, timeout=120)
    monkeypatch.setenv("VERL_OMNI_HOME", str(home))
    # an installed copy in the surrounding environment must not stand in for the clone's own
    dropped = ("RAY_ADDRESS", "PREFECT_API_URL", "PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    started = time.monotonic()
    process = subprocess.Popen(
        ["make", "demo"], cwd=clone, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        with Sampler(lambda: [process.pid, *services_here()]) as sampler:
            output, _ = process.communicate(timeout=LIMIT_S + 300)
    finally:
        process.kill()
        for name in (ray_head.NAME, prefect_server.NAME):
            services.stop(name)
    seconds = time.monotonic() - started
    sys.stderr.write(output)
    assert process.returncode == 0
    assert seconds <= LIMIT_S
    assert sampler.peak.total_bytes <= 8e9, sampler.peak
    told = _told(output)
    assert int(told["steps"]) >= 25
    assert 0.40 <= float(told["before"]) <= 0.65
    assert float(told["gain"]) >= 0.10 and float(told["low"]) > 0.05
    for name in ("picture", "report"):
        assert (clone / told[name]).is_file(), told[name]


def test_a_summary_is_read_as_it_is_printed() -> None:
    from verl_omni_core.report.summary import HeldOut, summary

    held_out = HeldOut(base=0.5, trained=0.625, low=0.0625, high=0.1875, prompts=128, samples_per_prompt=4)
    text = summary(run_id="r", steps=27, seconds=600, held_out=held_out, report="r.html", picture="p.png")
    told = _told("loading\n" + text + "\n")
    assert (told["steps"], told["before"], told["gain"], told["low"]) == ("27", "0.500", "+0.125", "+0.062")
    assert (told["picture"], told["report"]) == ("p.png", "r.html")
