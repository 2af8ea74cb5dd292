"""What an evaluation judges, and how its numbers come about; the engine's part is in ``tests/flows``."""

import json
import math

import numpy as np
import pytest

from verl_omni_core.errors import ConfigError, DataError, StoreError
from verl_omni_core.stages.evaluate import judged_rewards
from verl_omni_core.stages.export import export
from verl_omni_core.stages.subjects import plan_evaluation

PROFILE = "glyph-flow_grpo-ocr-cpu"


def test_a_run_is_judged_against_where_it_began(store):
    plan = plan_evaluation("adapters", store=store)
    assert [(s.label, s.step) for s in plan.subjects] == [("base", 0), ("average after step 1", 1)]
    assert plan.config.run.id.endswith("-evaluate-adapters")
    assert (plan.config.run.store, plan.config.run.steps) == (str(store), 0)


def test_without_a_base_only_the_weights_are_judged(store):
    plan = plan_evaluation("adapters", store=store, network="policy", step=2, base=False)
    assert [(s.label, s.step) for s in plan.subjects] == [("policy after step 2", 2)]


def test_where_training_began_is_judged_once(store):
    plan = plan_evaluation("adapters", store=store, network="policy", step=0)
    assert [s.step for s in plan.subjects] == [0]


def test_a_profile_is_a_base_model_with_the_engines_own_weights(tmp_path):
    plan = plan_evaluation(PROFILE, store=tmp_path, environ={})
    assert [(s.label, s.step, s.folder) for s in plan.subjects] == [("base glyph", 0, None)]


def test_an_exported_adapter_is_judged_under_its_step_and_rank(store, tmp_path):
    export("adapters", tmp_path / "out", store=store, network="policy", step=2)
    plan = plan_evaluation("full", store=store, adapter=tmp_path / "out")
    assert [(s.step, s.folder) for s in plan.subjects] == [(0, None), (2, str(tmp_path / "out"))]
    assert (plan.config.model.lora.rank, plan.config.model.lora.alpha) == (4, 8)


def test_prompts_and_settings_can_be_others(store, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"prompt": "mine", "ground_truth": "x"}) + "\n")
    plan = plan_evaluation("adapters", store=store, prompts=path, overrides=["sampler.validation.samples_per_prompt=2"])
    assert plan.config.data.validation == str(path)
    assert plan.config.sampler.validation.samples_per_prompt == 2


def test_training_prompts_need_not_exist_any_more(store):
    assert plan_evaluation("adapters", store=store).config.data.train == "gone.parquet"


@pytest.mark.parametrize(
    ("target", "asked", "message"),
    [
        ("nothing", {}, "neither a run nor a profile"),
        (PROFILE, {"step": 3}, "has no steps"),
        (PROFILE, {"network": "policy"}, "has no steps"),
        ("adapters", {"step": 9}, "it has policy: step 0-2"),
        ("adapters", {"adapter": "nowhere"}, "--adapter: 'nowhere' holds neither"),
        ("adapters", {"adapter": "nowhere", "step": 1}, "judge one of them"),
        ("adapters", {"overrides": ["sampler.hieght=8"]}, "sampler.height"),
    ],
)
def test_what_cannot_be_judged_is_told_before_anything_is_written(store, target, asked, message):
    before = sorted(store.iterdir())
    with pytest.raises(ConfigError, match=message):
        plan_evaluation(target, store=store, **asked)
    assert sorted(store.iterdir()) == before


def test_a_missing_file_of_prompts_is_told(store):
    with pytest.raises(DataError, match="data.validation"):
        plan_evaluation("adapters", store=store, prompts="gone.jsonl")


def test_statistics_of_two_prompts_by_hand():
    rewards = np.array([[1.0, 0.0], [0.5, np.nan]])
    found = judged_rewards(rewards, "x", 3, largest=1.0)
    assert found.mean == pytest.approx((0.5 + 0.5) / 2)
    assert found.std == pytest.approx((0.5 + 0.0) / 2)
    assert found.exact == pytest.approx(1 / 3)
    assert found.invalid == pytest.approx(1 / 4)
    assert (found.prompts, found.samples_per_prompt, found.step) == (2, 2, 3)
    # best of two draws with replacement from {0, 1} is 1 in three of four cases
    assert found.best[2] == pytest.approx((0.75 + 0.5) / 2, abs=0.03)
    assert found.worst[2] == pytest.approx((0.25 + 0.5) / 2, abs=0.03)


def test_an_open_ended_reward_has_no_exact_share():
    assert judged_rewards(np.ones((1, 1)), "x", 0, largest=math.inf).exact is None


def test_an_evaluation_without_a_single_score_fails():
    with pytest.raises(StoreError, match="has a score"):
        judged_rewards(np.full((2, 2), np.nan), "x", 0, largest=1.0)
