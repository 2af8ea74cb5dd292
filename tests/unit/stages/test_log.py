"""What a step's log holds, and where it goes."""

import time

import pytest

from tests.unit.stages import owned_run
from verl_omni_core.errors import StoreError
from verl_omni_core.metrics.names import metric_of
from verl_omni_core.rewards._contract import Score
from verl_omni_core.settings.retention import RetentionSettings
from verl_omni_core.stages.log import log
from verl_omni_core.stages.metric_table import metrics_of
from verl_omni_core.stages.plan import plan
from verl_omni_core.stages.session import let_go
from verl_omni_core.stages.validate import held_out, score_held_out
from verl_omni_core.store import index

REWARDS = [1.0, 0.0, 0.5, None]


@pytest.fixture
def config(tmp_path):
    made = owned_run.make(tmp_path)
    yield made
    let_go(str(tmp_path / "runs" / "owned"))


def logged(session, step, sources):
    done = log(session.ref, step, sources)
    table = session.store.table(done, "metrics")
    assert table["name"].to_pylist() == sorted(set(table["name"].to_pylist()))
    return metrics_of(table)


def test_a_step_is_timed_by_the_wall_from_plan_to_log_without_what_stands_beside_it(config):
    session = owned_run.take(config)
    sources = owned_run.commit_rollout(session, 2, version=1) + owned_run.commit_rest(session, 2, REWARDS)
    begun = session.begins[2]["plan"] = time.perf_counter() - 100
    session.spans[1] = {"checkpoint": 4.0}  # of the step before, waited for in this one
    session.spans[2] = {"plan": 1.0, "rollout": 40.0, "update": 29.0, "validate": 12.0, "preview": 3}
    session.spans[2]["begin_checkpoint"] = 1.0
    found = logged(session, 2, sources)
    assert 80 <= found["perf/time_per_step"] <= time.perf_counter() - begun - 20
    assert found["flow/overhead_s"] == pytest.approx(found["perf/time_per_step"] - 70)
    assert found["perf/throughput"] == owned_run.SAMPLES / (found["perf/time_per_step"] * owned_run.GPUS)
    assert (found["timing_s/save_checkpoint"], found["timing_s/copy_checkpoint"]) == (4, 1)
    assert found["timing_s/step"] == found["perf/time_per_step"]
    assert (found["timing_s/gen"], found["timing_s/testing"], found["timing_s/update_actor"]) == (40, 12, 29)
    assert found["timing_per_image_ms/gen"] == 10_000
    assert all(metric_of(name) is not None for name in found)


def test_a_step_that_an_earlier_owner_began_has_no_speed_and_only_its_own_times(config):
    first = owned_run.take(config)
    sources = owned_run.commit_rollout(first, 1, version=0)
    owned_run.leave(first)
    session = owned_run.take(config)
    assert plan(session.ref, 1) == sources[0]
    sources += owned_run.commit_rest(session, 1, REWARDS)
    session.spans[1] |= {"rollout": 0.001, "update": 29.0}
    found = logged(session, 1, sources)
    assert not {"perf/time_per_step", "perf/throughput", "flow/overhead_s", "timing_s/step"} & found.keys()
    assert {name for name in found if name.startswith("timing")} == {"timing_s/update_actor"}
    assert found["perf/total_num_images"] == owned_run.SAMPLES


def test_a_process_that_did_not_see_the_step_begin_times_no_step(config):
    session = owned_run.take(config)
    sources = owned_run.commit_rollout(session, 1, version=0) + owned_run.commit_rest(session, 1, REWARDS)
    session.begins.clear()
    assert "perf/time_per_step" not in logged(session, 1, sources)


def test_a_step_that_is_logged_extends_the_index_and_lets_old_trajectories_go(config, monkeypatch):
    monkeypatch.setattr(index, "STEPS", 2)
    limits = config.durability.model_copy(update={"retention": RetentionSettings(trajectory_steps=1)})
    session = owned_run.take(config.model_copy(update={"durability": limits}))
    for step in (1, 2, 3):
        sources = owned_run.commit_rollout(session, step, version=step - 1)
        sources += owned_run.commit_rest(session, step, REWARDS)
        if step < 3:
            attempt = session.store.attempt(step, "checkpoint", "key")
            attempt.commit([attempt.write_file("state", b"moments")], rows=1, parents=[], producer={})
        logged(session, step, sources)
    assert index.newest_block(session.store).last == 2
    for step in (1, 2):
        with pytest.raises(StoreError, match=r"deleted by retention .*trajectory_steps = 1"):
            session.store.table(session.store.find(step, "rollout"), "trajectories")
    assert session.store.table(session.store.find(3, "rollout"), "trajectories").num_rows == owned_run.SAMPLES
    assert index.finished_steps(session.store) == 3


def test_samples_of_an_older_policy_show_their_age(config):
    session = owned_run.take(config)
    sources = owned_run.commit_rollout(session, 3, version=0) + owned_run.commit_rest(session, 3, REWARDS)
    found = logged(session, 3, sources)
    assert found["training/off_policy/trajectory_staleness/mean"] == 2
    assert found["training/off_policy/trajectory_spans/max"] == 1
    assert found["critic/reward/combined/mean"] == 0.5


def test_recomputed_log_probs_are_compared_with_the_engines_by_timestep(config):
    session = owned_run.take(config)
    sources = owned_run.commit_rollout(session, 1, version=0) + owned_run.commit_rest(session, 1, REWARDS)
    values = owned_run.DRAWN_LOG_PROBS.clone()
    values[:, 1] += 0.25
    owned_run.commit_log_probs(session, 1, values)
    found = logged(session, 1, sources)
    assert found["rollout_corr/kl"] == -0.125
    assert found["rollout_corr/logprob_abs_diff/ts_900"] == 0
    assert found["rollout_corr/logprob_abs_diff/ts_800"] == 0.25


def test_a_steps_validation_is_in_its_table_and_reaches_the_tracker_once(config):
    session = owned_run.take(config)
    sources = owned_run.commit_rollout(session, 1, version=0) + owned_run.commit_rest(session, 1, REWARDS)
    prompts, _ = held_out(session, 2, version=1)
    scores = [Score(value, extra={"acc": float(value == 1)}) for value in (1.0, 0.5, 0.0, 1.0)]
    score_held_out(session, 1, owned_run.commit_held_out(session, 1, scores), prompts)
    found = logged(session, 1, sources)
    assert found["val-aux/unknown/reward/mean@2"] == 0.625
    assert found["val-core/unknown/acc/mean@2"] == 0.5
    sent = session.tracker.scalars_of
    assert [step for step, _ in sent] == [1, 1]
    assert not sent[0][1].keys() & sent[1][1].keys()
    assert sent[0][1] | sent[1][1] == found
