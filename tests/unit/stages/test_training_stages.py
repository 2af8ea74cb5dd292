"""Stages of the trainer with a real rank and a real store: the ledger after a crash, a restored trainer's catching up,
and when a reference is scored."""

from types import SimpleNamespace

import pytest

from tests.workers import committed_step
from verl_omni_core.errors import ContractError
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.log_probs import reference
from verl_omni_core.stages.session import RunRef, Session, let_go, register
from verl_omni_core.stages.sync import POLICY, weights_artifact
from verl_omni_core.stages.update import update
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.workers.actor_rollout_ref import ActorRolloutRefWorker


class Trainer(ActorRolloutRefWorker):
    """One rank in this process, with what a group adds."""

    def version(self):
        return self.ping().version


def settings(pipeline, *, deterministic=True, **algorithm):
    values = committed_step.config(pipeline, deterministic=deterministic).model_dump(mode="json")
    values["data"] |= {"prompts_per_step": 2}
    values["rollout"] |= {"group_size": 5}
    values["training"] |= {"prompts_per_update": 1}
    values["algorithm"] |= {"max_ratio_deviation": None, **algorithm}  # every step's samples here are the base's
    return RunConfig.model_validate(values)


class Run:
    def __init__(self, root, pipeline, **options):
        self.root, self.config = root, settings(pipeline, **options)
        self.refs = {step: committed_step.commit_step(root, pipeline, step) for step in (1, 2)}

    def restart(self):
        """Lose driver and trainer; return the new session, its trainer at version 0."""
        trainer = Trainer(self.config)
        trainer.init_model()
        store = RunStore(self.root, epoch=0)
        return register(Session(RunRef(str(self.root), 0), self.config, store, SimpleNamespace(trainer=trainer)))

    def update(self, session, step):
        return update(session.ref, step, *self.refs[step], None, None)


@pytest.fixture
def made(pipeline, tmp_path):
    runs = []

    def make(**options):
        runs.append(Run(tmp_path / f"run-{len(runs)}", pipeline, **options))
        return runs[-1]

    yield make
    for run in runs:
        let_go(str(run.root))


def ids(session):
    return [record["update_id"] for record in session.ledger.records()]


IDS = ["000001/0000", "000001/0001"]


@pytest.mark.parametrize("appended", [0, 1, 2])
def test_a_machine_that_dies_between_ledger_and_commit_leaves_each_update_once(made, appended, monkeypatch):
    run = made()
    session = run.restart()
    append, calls = session.ledger.append, []

    def dies(*record):
        if len(calls) == appended:
            raise OSError("power is out")
        calls.append(append(*record))

    with monkeypatch.context() as patch:
        patch.setattr(session.ledger, "append", dies)
        patch.setattr("verl_omni_core.stages.update.metric_table", dies)
        with pytest.raises(OSError):
            run.update(session, 1)
    again = run.restart()
    assert ids(again) == IDS[:appended]
    done = run.update(again, 1)
    assert ids(again) == IDS
    assert again.store.find(1, "update") == done


def test_other_samples_under_a_known_update_are_refused_before_anything_is_trained(made, pipeline, monkeypatch):
    run = made()
    session = run.restart()
    with monkeypatch.context() as patch:
        patch.setattr("verl_omni_core.stages.update.metric_table", None)
        with pytest.raises(TypeError):
            run.update(session, 1)
    again = run.restart()
    other = committed_step.commit_step(run.root / "other", pipeline, 1, lost=(9,))
    with pytest.raises(ContractError, match="000001/0000 with the batch"):
        update(again.ref, 1, *other, None, None)
    assert again.actors.trainer.version() == 0
    assert ids(again) == IDS


def test_a_restored_trainer_that_repeats_a_step_with_the_same_result_goes_on(made):
    run = made()
    session = run.restart()
    first = run.update(session, 1)
    weights_artifact(session, 1, POLICY)
    again = run.restart()
    assert run.update(again, 1) == first
    assert again.actors.trainer.version() == 1
    assert ids(again) == IDS


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_restored_trainer_that_comes_to_other_weights_stops_or_is_recorded_as_a_fork(made, deterministic):
    run = made(deterministic=deterministic)
    session = run.restart()
    run.update(session, 1)
    weights_artifact(session, 1, POLICY)
    again = run.restart()
    parameter = next(iter(again.actors.trainer._worker.engine.trainable.values()))
    parameter.data += 1e-3
    if deterministic:
        with pytest.raises(ContractError, match=r"repeated step 1 .* run.deterministic"):
            run.update(again, 1)
        return
    for _ in range(2):
        run.update(again, 1)
    assert ids(again) == [*IDS, "000001/fork-0"]
    fork = again.ledger.records()[-1]
    assert (fork["kind"], fork["weights_digest"]) == ("fork", again.actors.trainer.weights_checksum())
    assert again.ledger.as_table().num_rows == 3


@pytest.mark.parametrize(
    "algorithm,scored",
    [({"kl_coef": 0.1}, True), ({"kl_coef": 0.0}, False), ({"name": "tests.workers.keeps_old_policy"}, False)],
)
def test_a_reference_is_scored_where_the_loss_requires_one(made, algorithm, scored):
    run = made(**algorithm)
    session = run.restart()
    ref = reference(session.ref, 1, run.refs[1][0])
    assert (ref is not None) == scored
    if ref is not None:
        assert session.store.table(ref, "reference").num_rows == 10
    assert update(session.ref, 1, *run.refs[1], None, ref) == session.store.find(1, "update")
