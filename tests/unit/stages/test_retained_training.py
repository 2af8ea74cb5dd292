"""A run that keeps as little as it may, with a real rank: whenever its trainer is lost, it learns on all the same."""

import pytest

from tests.unit.stages.trained_run import STEPS, TrainedRun
from verl_omni_core.errors import StoreError
from verl_omni_core.stages.retention import retain
from verl_omni_core.stages.session import let_go
from verl_omni_core.store.verified import is_verified

LITTLE = {
    "level": "ledger",
    "snapshot_every": 2,
    "retention": {"trajectory_steps": 0, "media_share": 0.0, "checkpoints": 1, "weight_steps": 1},
}


@pytest.fixture(scope="module")
def expected(pipeline, tmp_path_factory):
    """Checksums of policy and average after each step of a run that keeps everything and loses nothing."""
    run = TrainedRun(tmp_path_factory.mktemp("undisturbed"), pipeline)
    yield run.train(run.restart())
    let_go(str(run.root))


def train(run, session, last):
    """Train from where the trainer stands, and after each step let go what the settings let go."""
    found = {}
    for step in range(session.actors.trainer.version() + 1, last + 1):
        run.learn(session, step)
        found[step] = run.weights(session, step)
        retain(session, step)
    return found


def with_trajectories(session):
    steps = []
    for step in range(1, STEPS + 1):
        ref = session.store.find(step, "rollout")
        if ref is not None:
            try:
                session.store.table(ref, "trajectories")
            except StoreError as error:
                if "deleted by retention" not in str(error):
                    raise
            else:
                steps.append(step)
    return steps


@pytest.mark.parametrize("lost_after", range(1, STEPS + 1))
def test_a_trainer_lost_after_any_step_is_replayed_to_the_same_bits_from_what_was_kept(
    pipeline, tmp_path, expected, lost_after
):
    run = TrainedRun(tmp_path, pipeline, durability=LITTLE)
    session = run.restart()
    assert train(run, session, lost_after) == {step: expected[step] for step in range(1, lost_after + 1)}
    # the snapshot of step 2 is committed in step 3, and read back when that is finished
    newest = 2 if lost_after > 2 else 0
    assert with_trajectories(session) == list(range(newest + 1, lost_after + 1))
    assert newest == 0 or is_verified(session.store, session.store.find(newest, "checkpoint"))
    session = run.resume()
    assert session.actors.trainer.version() == newest
    assert train(run, session, STEPS) == {step: expected[step] for step in range(newest + 1, STEPS + 1)}
    let_go(str(run.root))
