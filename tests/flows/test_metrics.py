"""The metrics of a run: the names of the list, in its tables and in TensorBoard."""

from collections import Counter

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.flows import small
from tests.flows.conftest import Ran
from verl_omni_core.metrics.names import METRICS, metric_of
from verl_omni_core.stages.metric_table import metrics_of

pytestmark = pytest.mark.engine

STEPS = range(1, small.STEPS + 1)
SOURCES = ("rollout", "reward", "advantage", "update", "validate")
EVERY_STEP = {
    *(f"actor/{name}" for name in ("loss", "ppo_kl", "ratio_mean", "ratio_std", "grad_norm", "lr")),
    *(f"actor/pg_clipfrac{name}" for name in ("", "_higher", "_lower")),
    *(f"actor/rollout_corr/{name}" for name in ("kl", "k3_kl", "log_ppl_diff", "chi2_token", "logprob_abs_diff_max")),
    *(f"critic/{what}/{name}" for what in ("rewards", "advantages", "returns") for name in ("mean", "max", "min")),
    *(f"critic/rewards/{name}" for name in ("zero_std_ratio", "std_mean", "group_size", "invalid_fraction")),
    *(f"critic/reward/{name}/mean" for name in ("ocr", "combined")),
    *(f"timing_s/{name}" for name in ("gen", "reward", "adv", "update_actor", "update_weights", "step")),
    *(f"timing_per_image_ms/{name}" for name in ("gen", "adv", "update_actor")),
    *(f"perf/{name}" for name in ("total_num_images", "time_per_step", "throughput")),
    *(f"training/off_policy/trajectory_{name}/mean" for name in ("staleness", "staleness_worst", "spans")),
    *(f"training/rollout_failure/evicted_{name}" for name in ("groups", "trajectories")),
    *(f"training/rollout_failure/{name}" for name in ("refilled_prompts", "refill_rounds")),
    "training/global_step",
    "training/epoch",
    "flow/overhead_s",
}
JUDGED = {
    f"val-core/glyph/acc/mean@{small.HELD_OUT_SAMPLES}",
    f"val-core/glyph/acc/best@{small.HELD_OUT_SAMPLES}/mean",
    f"val-aux/glyph/acc/worst@{small.HELD_OUT_SAMPLES}/mean",
    f"val-aux/glyph/reward/mean@{small.HELD_OUT_SAMPLES}",
    f"val-aux/glyph/reward/std@{small.HELD_OUT_SAMPLES}",
    f"val-aux/glyph/reward/ocr/mean@{small.HELD_OUT_SAMPLES}",
}
NOT_IN_THIS_RUN = {
    "actor/kl_loss",  # algorithm.kl_coef
    "actor/kl_coef",
    "rollout_corr/logprob_abs_diff/ts_{timestep}",  # algorithm.recompute_old_log_probs
}


@pytest.fixture(scope="module")
def scalars(flow: Ran) -> dict[int, dict[str, float]]:
    """What TensorBoard reads from the run's folder, by step; every name once a step."""
    events = EventAccumulator(str(flow.root / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    read = [(event.step, tag, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    assert [key for key, times in Counter((step, tag) for step, tag, _ in read).items() if times > 1] == []
    return {step: {tag: value for at, tag, value in read if at == step} for step in (0, *STEPS)}


def test_the_log_has_every_name_and_tensorboard_the_same_numbers(flow: Ran, scalars: dict) -> None:
    for step in STEPS:
        found = flow.recorded.metrics(step)
        assert found.keys() >= EVERY_STEP | (JUDGED if step == small.STEPS else set())
        assert scalars[step] == pytest.approx(found, rel=1e-6, abs=1e-12)
    assert scalars[0] == pytest.approx(metrics_of(flow.recorded.table(0, "validate", "metrics")), rel=1e-6, abs=1e-12)
    assert scalars[0].keys() >= JUDGED


def test_what_is_emitted_is_listed_once_and_what_is_listed_is_emitted(flow: Ran) -> None:
    emitted = set()
    for step in STEPS:
        names = flow.recorded.table(step, "log", "metrics")["name"].to_pylist()
        assert len(names) == len(set(names))
        stages = [name for name in SOURCES if flow.recorded.store.find(step, name) is not None]
        parts = [flow.recorded.table(step, stage, "metrics")["name"].to_pylist() for stage in stages]
        assert len(set().union(*parts)) == sum(map(len, parts)), "two stages emit one name"
        emitted |= {*names}
    assert [name for name in emitted if metric_of(name) is None] == []
    assert {m.name for m in METRICS} - {m.name for m in map(metric_of, emitted) if m is not None} == NOT_IN_THIS_RUN


def test_times_of_a_step_add_up(flow: Ran) -> None:
    """On CPUs the divisor is 1; validation, pictures and checkpoint stand beside the step."""
    for step in STEPS:
        found = flow.recorded.metrics(step)
        names = ("plan", "gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights")
        inside = sum(found[f"timing_s/{name}"] for name in names)
        assert found["perf/time_per_step"] == pytest.approx(inside + found["flow/overhead_s"])
        assert 0 < found["flow/overhead_s"] < found["perf/time_per_step"]
        assert found["perf/throughput"] == small.SAMPLES / found["perf/time_per_step"]
        # the engine's log-probs are the old ones, so both compare the same numbers
        assert found["actor/rollout_corr/kl"] == pytest.approx(found["actor/ppo_kl"], abs=1e-9)
