"""VeRL-Omni's names and ours."""

import pytest

from verl_omni_core.errors import UnknownNameError
from verl_omni_core.settings import names, tree
from verl_omni_core.settings.loader import load


def test_every_entry_is_a_setting_and_every_note_has_an_entry():
    assert set(names.VERL_OMNI) <= set(tree.fields())
    assert set(names.NOTES) <= set(names.VERL_OMNI)


def test_no_foreign_key_means_two_of_ours():
    keys = [key for theirs in names.VERL_OMNI.values() for key in theirs]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("data.train_batch_size", "data.prompts_per_step"),
        ("rollout.n", "rollout.group_size"),
        ("actor_rollout_ref.rollout.n", "rollout.group_size"),
        ("ppo_mini_batch_size", "training.prompts_per_update"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "training.prompts_per_update"),
        ("pipeline.num_inference_steps", "sampler.num_inference_steps"),
        ("algo.noise_level", "sampler.noise_level"),
        ("algo.sde_window_size", "sampler.sde_window_size"),
        ("algo.sde_window_range", "sampler.sde_window_range"),
        ("true_cfg_scale", "sampler.guidance_scale"),
        ("diffusion_loss.clip_ratio", "algorithm.clip_range"),
        ("kl_loss_coef", "algorithm.kl_coef"),
        ("adv_clip_max", "algorithm.adv_clip"),
        ("algorithm.norm_adv_by_std_in_grpo", "algorithm.normalize_std"),
        ("actor.optim.lr", "training.learning_rate"),
        ("ppo_micro_batch_size_per_gpu", "training.micro_batch"),
        ("ppo_epochs", "training.epochs_per_step"),
        ("actor.grad_clip", "training.grad_clip"),
        ("lora_rank", "model.lora.rank"),
        ("lora_alpha", "model.lora.alpha"),
        ("target_modules", "model.lora.targets"),
        ("parameter_sync_step", "weights.sync_interval"),
        ("trainer.total_training_steps", "run.steps"),
        ("data.seed", "run.seed"),
        ("full_determinism", "run.deterministic"),
        ("trainer.test_freq", "run.validate_every"),
        ("trainer.save_freq", "run.checkpoint_every"),
        ("rollout.num_workers", "rollout.replicas"),
        ("tensor_model_parallel_size", "rollout.tensor_parallel"),
        ("max_num_seqs", "rollout.max_batch"),
        ("reward.required", "reward.failure"),
    ],
)
def test_their_spelling_is_answered_with_ours(theirs, ours):
    with pytest.raises(UnknownNameError) as refusal:
        load(overrides=[f"{theirs}=1"], environ={})
    assert f"VeRL-Omni's {theirs} is " in str(refusal.value)
    assert f"'{ours}'" in str(refusal.value)


def test_a_foreign_tree_is_answered_key_by_key(tmp_path):
    profile = tmp_path / "theirs.toml"
    profile.write_text("[actor_rollout_ref.rollout]\nn = 4\n[actor_rollout_ref.actor]\nppo_epochs = 2\n")
    with pytest.raises(UnknownNameError) as refusal:
        load(profile, environ={})
    lines = str(refusal.value).splitlines()
    assert len(lines) == 2 and "'rollout.group_size'" in lines[0] and "'training.epochs_per_step'" in lines[1]


def test_a_key_with_several_meanings_lists_them():
    assert names.ours("num_workers") == ["reward.workers", "rollout.agent_workers", "rollout.replicas"]
    assert names.ours("agent.num_workers") == ["rollout.agent_workers"]


def test_every_setting_says_what_it_is_and_accepts():
    for name, field in tree.fields().items():
        assert field.description and field.description.endswith("."), f"{name} lacks a sentence"
        assert tree.allowed(field)


def test_units_follow_from_names():
    assert tree.unit("rollout.request_timeout_s") == "seconds"
    assert tree.unit("rollout.batch_wait_ms") == "milliseconds"
    assert tree.unit("sampler.height") == "pixels"
    assert tree.unit("run.steps") == "–"
