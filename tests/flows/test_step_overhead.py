"""The overhead benchmark runs and says what it promises; its numbers are read by people."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240
SECONDS = ("product_step_s", "in_memory_step_s", "noop_step_s")
STAGES = {"plan", "rollout", "reward", "advantage", "update", "sync", "log"}


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The only line that a small measurement prints."""
    folder = tmp_path_factory.mktemp("overhead")
    command = [sys.executable, "-m", "benchmarks.step_overhead", "--small", "--pairs", "1", "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    (printed,) = done.stdout.splitlines()
    return json.loads(printed)


@pytest.mark.engine
def test_overhead_benchmark_prints_one_line_with_both_steps_and_what_is_between_them(line):
    assert (line["benchmark"], line["pairs"], line["samples"]) == ("step_overhead", 1, 4)
    assert all(line[name] > 0 for name in SECONDS)
    ratio = line["product_step_s"] / line["in_memory_step_s"]
    assert math.isclose(line["ratio_of_medians"], ratio, rel_tol=0.01)
    assert math.isclose(line["median_of_ratios"], ratio, rel_tol=0.01)
    assert math.isclose(line["overhead_s"], line["product_step_s"] - line["in_memory_step_s"], abs_tol=1e-3)
    assert line["product_stages_s"].keys() >= STAGES
    assert line["noop_stages_s"].keys() >= STAGES
    assert line["cpu_count"] >= 1
    assert len(line["load_average"]) == 2
    assert line["versions"].keys() >= {"python", "torch", "vllm-omni", "ray", "prefect", "pyarrow"}


@pytest.mark.engine
def test_product_and_in_memory_loop_make_the_same_steps_bit_by_bit(line):
    assert line["equal_results"] is True
