"""Every profile that ships resolves, names what exists, and says what it is for."""

import re
from importlib import resources

import pytest

from verl_omni_core import registry
from verl_omni_core.settings import resolve
from verl_omni_core.settings.loader import load, profile_names

NAMES = profile_names()


@pytest.mark.parametrize("name", NAMES)
def test_profile_resolves_and_its_components_exist(name):
    config = load(name, environ={}).config
    resolve.algorithm_options(config)
    resolve.sampler_options(config)
    resolve.adapter(config)
    registry.component("engine", config.rollout.name)
    for scorer in config.reward.scorers:
        resolve.scorer_options(scorer)


@pytest.mark.parametrize("name", NAMES)
def test_profile_is_named_by_model_algorithm_reward_hardware(name):
    model, algorithm, reward, hardware = name.split("-")
    config = load(name, environ={}).config
    assert algorithm == config.algorithm.name
    assert config.reward.scorers[0].name.startswith(reward)
    assert re.fullmatch(r"cpu|\d+gpu", hardware)
    assert config.model.path == "glyph" if model == "glyph" else model.startswith(config.model.name)


@pytest.mark.parametrize("name", NAMES)
def test_profile_begins_with_purpose_and_hardware(name):
    text = (resources.files("profiles") / f"{name}.toml").read_text(encoding="utf-8")
    comment = "".join(line for line in text.splitlines()[:4] if line.startswith("#"))
    assert len(comment) > 80 and re.search(r"CPU|GPU", comment)


def test_glyph_profiles_on_a_cpu_are_deterministic():
    for name in NAMES:
        if name.startswith("glyph-") and name.endswith("-cpu"):
            assert load(name, environ={}).config.run.deterministic


def test_the_demo_trains_at_least_25_steps_through_the_real_engine():
    config = load("glyph-flow_grpo-ocr-cpu", environ={}).config
    assert config.run.steps >= 25 and config.rollout.name == "vllm_omni"
    assert config.sampler.validation.samples_per_prompt == 4 and config.data.max_validation_prompts is None


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_in_low_precision_recomputes_log_probs_in_the_trainer(name):
    config = load(name, environ={}).config
    if {config.model.dtype, config.rollout.dtype} != {"float32"}:
        assert config.algorithm.recompute_old_log_probs and config.model.dtype == config.rollout.dtype
