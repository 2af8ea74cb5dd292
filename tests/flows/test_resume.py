"""What lives on between two starts of a run, and what does not; on the reference engine, which starts sooner."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows import small
from tests.flows.conftest import Ran
from verl_omni_core.evaluate import evaluate
from verl_omni_core.online import train
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.ending import end_run
from verl_omni_core.stages.subjects import plan_evaluation
from verl_omni_core.store.lease import is_owned
from verl_omni_core.store.runs import list_runs

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
LIMIT_S = 300


@pytest.fixture
def runs(home: Path, tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "runs"
    yield folder
    for run in list_runs(folder):
        end_run(run.run_id, folder)


def quick_settings(store: Path, **changes: object) -> RunConfig:
    quick = {"rollout__name": "diffusers", "run__validate_before": "false", "run__images_every": 0}
    return small.settings("a", store, **{**quick, "run__steps": 1, "data__max_validation_prompts": 2, **changes})


def _trainer(config: RunConfig) -> int:
    return Ran(config, "").actors().trainer.states()[0].pid


def test_a_retried_flow_run_resumes_the_run_that_it_began_on_its_living_actors(runs: Path) -> None:
    command = [sys.executable, "-m", "tests.flows.retried", str(runs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["completed"]
    (run,) = list_runs(runs)
    assert (run.run_id[:7], run.status, run.steps_done) == ("online-", "finished", 1)
    assert len(told["trainers"]) == 2 and len(set(told["trainers"])) == 1


def test_actors_serve_neither_other_settings_nor_another_run_in_the_same_folder(runs: Path) -> None:
    first = quick_settings(runs)
    train(first)
    impatient, weights = _trainer(first), Ran(first, "").recorded.checksum(1)
    patient = quick_settings(runs, run__steps=2, rollout__request_timeout_s=777)
    train(patient)
    rebuilt = _trainer(patient)
    assert rebuilt != impatient and Ran(patient, "").recorded.checksum(1) == weights
    shutil.rmtree(runs / "a")
    faster = quick_settings(runs, rollout__request_timeout_s=777, training__learning_rate=1e-2)
    train(faster)
    assert _trainer(faster) != rebuilt and Ran(faster, "").recorded.checksum(1) != weights
    living = 4  # a trainer, a replica, a rollout worker, a reward worker: nothing is left of the other three
    shutil.rmtree(runs / "a")
    assert end_run("a", runs) == living


def test_an_interrupted_run_can_be_torn_down_by_the_process_that_ran_it(runs: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with small.before(1, "update", interrupt), pytest.raises(KeyboardInterrupt):
        train(quick_settings(runs))
    assert [run.status for run in list_runs(runs)] == ["stopped"] and not is_owned(runs / "a")
    assert end_run("a", runs) == 4


def test_an_evaluation_that_breaks_off_leaves_no_actor(runs: Path) -> None:
    own = ("run.", "cluster.keep_actors")  # an evaluation sets them itself
    overrides = [item for item in small.overrides("x", runs) if not item.startswith(own)]
    plan = plan_evaluation(small.DEMO, store=runs, overrides=[*overrides, "rollout.name=diffusers"], run_id="judged")
    with small.before(0, "validate", small.stop), pytest.raises(small.Stopped):
        evaluate(plan)
    assert [run.status for run in list_runs(runs)] == ["failed"]
    assert end_run("judged", runs) == 0
