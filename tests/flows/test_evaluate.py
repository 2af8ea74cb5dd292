"""Evaluations through the engine, without a trainer: the run's own numbers come out, bit for bit."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.flows import small
from tests.flows.conftest import Ran, command_line
from tests.flows.recorded import Recorded
from verl_omni_core.evaluate import evaluate
from verl_omni_core.metrics.validation import paired_bootstrap
from verl_omni_core.stages.ending import end_run
from verl_omni_core.stages.export import export
from verl_omni_core.stages.subjects import plan_evaluation
from verl_omni_core.store.runs import list_runs

pytestmark = pytest.mark.engine
_GROUPS = ("model", "data", "sampler", "rollout", "tracking", "durability")


def _rewards(recorded: Recorded, step: int) -> np.ndarray:
    return recorded.rewards(step, "validate").reshape(-1, small.HELD_OUT_SAMPLES)


@pytest.fixture(scope="module")
def judged(home: Path, flow: Ran) -> dict:
    """The command on a finished run, as a Prefect flow."""
    arguments = ["evaluate", str(flow.config.run.id), "--store", flow.config.run.store, "--json"]
    output, _ = command_line(home, arguments)
    return json.loads(output.splitlines()[-1])


def test_the_runs_own_validation_comes_out_bit_for_bit(flow, judged):
    found = Recorded(Path(judged["folder"]))
    for step in (0, small.STEPS):
        assert np.array_equal(_rewards(found, step), _rewards(flow.recorded, step))
        assert found.pixels(step, "validate-samples").equal(flow.recorded.pixels(step, "validate-samples"))


def test_the_gain_and_its_interval_are_those_of_the_committed_rewards(flow, judged):
    before, after = (_rewards(flow.recorded, step) for step in (0, small.STEPS))
    expected = paired_bootstrap(before, after)
    assert judged["gain"] == {"mean": pytest.approx(expected.mean), "low": expected.low, "high": expected.high}
    assert [subject["step"] for subject in judged["judged"]] == [0, small.STEPS]
    assert judged["judged"][1]["mean"] == pytest.approx(after.mean())
    assert judged["judged"][1]["exact"] == pytest.approx((after == 1).mean())
    assert Path(judged["picture"]).is_file()


def test_the_result_is_committed_in_a_run_of_its_own_that_names_engine_and_weights(flow, judged):
    found = Recorded(Path(judged["folder"]))
    ref = found.ref(small.STEPS, "evaluation")
    assert json.loads(found.store.path_of(ref, "evaluation.json").read_text())["gain"] == judged["gain"]
    assert found.checksum(small.STEPS, "weights") == flow.recorded.checksum(small.STEPS, "sync-average")
    (engine,) = found.manifest(small.STEPS, "validate-samples").producer["engines"]
    assert engine["engine"] == "vllm_omni" and engine["requests"] == 2 * small.HELD_OUT * small.HELD_OUT_SAMPLES
    listed = {run.run_id: run for run in list_runs(flow.config.run.store)}[judged["run_id"]]
    assert (listed.kind, listed.status) == ("evaluate", "finished")


def test_an_evaluation_leaves_no_actor_behind(flow, judged):
    assert end_run(judged["run_id"], flow.config.run.store) == 0


def test_an_exported_adapter_over_the_profile_gives_the_same_numbers_as_the_run(home, flow, judged, tmp_path):
    export(str(flow.config.run.id), tmp_path / "out", store=flow.config.run.store)
    overrides = [item for item in small.overrides("x", flow.config.run.store) if item.split(".")[0] in _GROUPS]
    plan = plan_evaluation(
        small.DEMO, store=tmp_path / "runs", adapter=tmp_path / "out", overrides=overrides, base=False
    )
    result = evaluate(plan)
    assert result.gain is None
    assert np.array_equal(_rewards(Recorded(Path(result.folder)), small.STEPS), _rewards(flow.recorded, small.STEPS))
