"""Who draws: what manifests say, which modules the processes hold, and what happens when the engine stops."""

from __future__ import annotations

import json
import sys
from typing import Any

import psutil
import pytest
import ray

from tests.flows import small
from tests.flows.conftest import Broken, Ran
from verl_omni_core.errors import EngineError
from verl_omni_core.online import train
from verl_omni_core.rollout import vllm_omni

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

FORBIDDEN = "verl_omni_core.rollout.diffusers"


def _processes(actor: Any) -> tuple[int, list[str]]:
    """Return the actor's process id and the names of its modules; runs inside the actor."""
    import os
    import sys

    return os.getpid(), sorted(sys.modules)


def test_manifests_name_engine_version_pipeline_class_and_its_own_count(flow: Ran) -> None:
    (engine,) = flow.recorded.manifest(small.STEPS, "rollout").producer["engines"]
    assert engine["engine"] == "vllm_omni"
    assert engine["version"] == vllm_omni.installed_version()
    assert engine["pipeline_class"] == "SD3TrajectoryPipeline"
    counts = [
        flow.recorded.manifest(s, "rollout").producer["engines"][0]["requests"] for s in range(1, small.STEPS + 1)
    ]
    assert counts == sorted(counts) and counts[0] > 0
    (recorded,) = json.loads((flow.root / "engine.json").read_text())["replicas"]
    assert {**recorded, "requests": 0} == {**engine, "requests": 0}
    assert recorded["requests"] == flow.recorded.samples_drawn()


def test_the_engines_own_count_is_the_number_of_samples_drawn(flow: Ran) -> None:
    held_out = small.HELD_OUT * small.HELD_OUT_SAMPLES
    expected = small.STEPS * small.SAMPLES + 2 * held_out + 2 * 2  # two validations, two grids of two prompts
    assert flow.recorded.samples_drawn() == expected
    assert flow.requests() == [expected]


def test_no_process_of_the_demo_holds_the_diffusers_engine(flow: Ran) -> None:
    assert FORBIDDEN not in flow.modules  # the command's own process, where the flow ran
    assert "flows.online" in flow.modules and "verl_omni_core.stages.rollout" in flow.modules
    actors = flow.actors()
    handles = [*actors.trainer.handles, *actors.replicas, *actors.rollout_workers, *actors.reward_workers]
    told = ray.get([handle.__ray_call__.remote(_processes) for handle in handles], timeout=60)
    assert len({pid for pid, _ in told}) == len(handles)
    for pid, modules in told:
        assert FORBIDDEN not in modules, psutil.Process(pid).cmdline()
    replica = set(told[len(actors.trainer.handles)][1])
    assert "vllm_omni.entrypoints.async_omni" in replica
    # an engine that worked in child processes would need to be asked there
    replica_pid = told[len(actors.trainer.handles)][0]
    assert not [child for child in psutil.Process(replica_pid).children(recursive=True) if _is_python(child)]


def _is_python(process: psutil.Process) -> bool:
    return "resource_tracker" not in " ".join(process.cmdline()) and process.name().startswith("python")


def test_stopping_the_engine_fails_the_rollout_and_commits_nothing(plain: tuple[Ran, Broken]) -> None:
    ran, step = plain[0], small.STEPS + 1
    settings = small.settings("plain", ran.root.parent, rollout__replicas=2, run__steps=step)

    def close() -> None:
        ray.get([replica.close.remote() for replica in ran.actors().replicas], timeout=120)

    with small.before(step, "rollout", close), pytest.raises(EngineError, match="failed 3 times.*runs no engine"):
        train(settings)
    assert ran.recorded.store.find(step, "plan") is not None
    for stage in ("rollout", "reward", "advantage", "update", "sync"):
        assert ran.recorded.store.find(step, stage) is None


def test_the_run_takes_at_most_8_gb(flow: Ran) -> None:
    assert flow.peak is not None
    assert 1e9 < flow.peak.total_bytes <= 8e9, flow.peak
    print(flow.peak, file=sys.stderr)
