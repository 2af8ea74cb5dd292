"""Our names of settings, and VeRL-Omni's: so that whoever types the latter is told the former."""

from collections.abc import Mapping

_MODEL, _ACTOR = "actor_rollout_ref.model.", "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."
_PIPELINE, _ALGO, _VALIDATION = _ROLLOUT + "pipeline.", _ROLLOUT + "algo.", _ROLLOUT + "val_kwargs."
_ENGINE = _ROLLOUT + "engine_kwargs.vllm_omni."

VERL_OMNI: Mapping[str, tuple[str, ...]] = {
    "run.id": ("trainer.experiment_name",),
    "run.store": ("trainer.default_local_dir",),
    "run.steps": ("trainer.total_training_steps", "trainer.total_epochs"),
    "run.seed": ("data.seed", _ROLLOUT + "seed", _ACTOR + "data_loader_seed", _ACTOR + "fsdp_config.seed"),
    "run.deterministic": (_ACTOR + "fsdp_config.full_determinism", _ROLLOUT + "full_determinism"),
    "run.validate_every": ("trainer.test_freq",),
    "run.validate_before": ("trainer.val_before_train",),
    "run.checkpoint_every": ("trainer.save_freq",),
    "run.resume": ("trainer.resume_mode", "trainer.resume_from_path"),
    "run.end_margin_s": ("trainer.esi_redundant_time",),
    "model.name": (_MODEL + "architecture",),
    "model.path": (_MODEL + "path",),
    "model.dtype": (_ACTOR + "fsdp_config.dtype", _ACTOR + "fsdp_config.model_dtype"),
    "model.lora.rank": (_MODEL + "lora_rank",),
    "model.lora.alpha": (_MODEL + "lora_alpha",),
    "model.lora.init": (_MODEL + "lora_init_weights",),
    "model.lora.targets": (_MODEL + "target_modules",),
    "model.lora.exclude": (_MODEL + "exclude_modules",),
    "model.lora.dtype": (_MODEL + "lora_dtype",),
    "model.lora.adapter_path": (_MODEL + "lora_adapter_path",),
    "model.gradient_checkpointing": (_MODEL + "enable_gradient_checkpointing",),
    "data.train": ("data.train_files",),
    "data.validation": ("data.val_files",),
    "data.prompt_column": ("data.prompt_key",),
    "data.negative_prompt_column": ("data.negative_prompt_key",),
    "data.prompts_per_step": ("data.train_batch_size", "data.gen_batch_size"),
    "data.shuffle": ("data.shuffle",),
    "data.overlong": ("data.truncation", "data.filter_overlong_prompts"),
    "data.max_validation_prompts": ("data.val_max_samples",),
    "sampler.name": (_ALGO + "sde_type",),
    "sampler.height": (_PIPELINE + "height",),
    "sampler.width": (_PIPELINE + "width",),
    "sampler.num_inference_steps": (_PIPELINE + "num_inference_steps",),
    "sampler.noise_level": (_ALGO + "noise_level",),
    "sampler.sde_window_size": (_ALGO + "sde_window_size",),
    "sampler.sde_window_range": (_ALGO + "sde_window_range",),
    "sampler.window": (_ALGO + "sample_strategy",),
    "sampler.guidance_scale": (_PIPELINE + "true_cfg_scale", _PIPELINE + "guidance_scale"),
    "sampler.max_sequence_length": (_PIPELINE + "max_sequence_length",),
    "sampler.validation.num_inference_steps": (_VALIDATION + "pipeline.num_inference_steps",),
    "sampler.validation.samples_per_prompt": (_VALIDATION + "n",),
    "sampler.validation.seed": (_VALIDATION + "seed",),
    "sampler.validation.guidance_scale": (_VALIDATION + "pipeline.true_cfg_scale",),
    "rollout.name": (_ROLLOUT + "name",),
    "rollout.group_size": (_ROLLOUT + "n", _ACTOR + "rollout_n"),
    "rollout.replicas": (_ROLLOUT + "num_workers",),
    "rollout.tensor_parallel": (_ROLLOUT + "tensor_model_parallel_size",),
    "rollout.max_batch": (_ROLLOUT + "max_num_seqs", _ENGINE + "max_num_seqs"),
    "rollout.batch_wait_ms": (_ENGINE + "request_batch_max_wait_ms",),
    "rollout.dtype": (_ROLLOUT + "dtype",),
    "rollout.agent_workers": (_ROLLOUT + "agent.num_workers",),
    "rollout.agent_loop": (_ROLLOUT + "agent.default_agent_loop",),
    "rollout.max_concurrency": (_ROLLOUT + "agent.max_concurrency",),
    "rollout.prompt_length": (_ROLLOUT + "prompt_length", "data.max_prompt_length"),
    "rollout.max_prompt_embed_length": (_ROLLOUT + "max_prompt_embed_length",),
    "rollout.failure": ("trainer.v1.sampler.drop_incomplete_groups",),
    "rollout.refill_rounds": ("trainer.v1.sampler.max_incomplete_group_refill_rounds",),
    "rollout.start_timeout_s": (_ENGINE + "init_timeout", _ENGINE + "stage_init_timeout"),
    "rollout.options": (_ROLLOUT + "engine_kwargs",),
    "reward.scorers": ("reward.reward_functions",),
    "reward.workers": ("reward.num_workers",),
    "reward.failure": ("reward.required",),
    "algorithm.name": (_MODEL + "algorithm", "algorithm.adv_estimator", _ACTOR + "diffusion_loss.loss_mode"),
    "algorithm.clip_range": (_ACTOR + "diffusion_loss.clip_ratio",),
    "algorithm.adv_clip": (_ACTOR + "diffusion_loss.adv_clip_max",),
    "algorithm.kl_coef": (_ACTOR + "kl_loss_coef", _ACTOR + "use_kl_loss", _ACTOR + "diffusion_loss.ref_kl_coef"),
    "algorithm.global_std": ("algorithm.global_std",),
    "algorithm.normalize_std": ("algorithm.norm_adv_by_std_in_grpo",),
    "algorithm.recompute_old_log_probs": ("algorithm.rollout_correction.bypass_mode",),
    "training.ranks": ("trainer.n_gpus_per_node", "trainer.nnodes"),
    "training.learning_rate": (_ACTOR + "optim.lr",),
    "training.micro_batch": (_ACTOR + "ppo_micro_batch_size_per_gpu",),
    "training.prompts_per_update": (_ACTOR + "ppo_mini_batch_size",),
    "training.epochs_per_step": (_ACTOR + "ppo_epochs",),
    "training.grad_clip": (_ACTOR + "grad_clip", _ACTOR + "optim.clip_grad"),
    "training.optimizer": (_ACTOR + "optim.optimizer",),
    "training.weight_decay": (_ACTOR + "optim.weight_decay",),
    "training.betas": (_ACTOR + "optim.betas",),
    "training.eps": (_ACTOR + "optim.eps",),
    "training.schedule": (_ACTOR + "optim.lr_scheduler_type",),
    "training.warmup_steps": (_ACTOR + "optim.lr_warmup_steps", _ACTOR + "optim.lr_warmup_steps_ratio"),
    "training.min_lr_ratio": (_ACTOR + "optim.min_lr_ratio",),
    "training.step_timeout_s": ("actor_rollout_ref.nccl_timeout",),
    "weights.sync_interval": ("trainer.v1.separate_async.parameter_sync_step",),
    "durability.checkpoint_contents": (_ACTOR + "checkpoint.save_contents",),
    "durability.retention.checkpoints": ("trainer.max_actor_ckpt_to_keep",),
    "tracking.tensorboard": ("trainer.logger",),
}
"""Our dotted name to VeRL-Omni's keys for the same thing; settings without an entry have no counterpart there."""

NOTES: Mapping[str, str] = {
    "algorithm.recompute_old_log_probs": "the opposite: true where bypass_mode is false",
    "algorithm.kl_coef": "0 switches the term off, so use_kl_loss needs no counterpart",
    "data.overlong": "'error' or 'truncate'",
    "rollout.failure": "there an incomplete group gives way to another prompt",
    "run.resume": "a step instead of a path",
    "run.steps": "counted in steps only",
    "training.prompts_per_update": "in prompts as well",
    "training.warmup_steps": "in steps",
}
"""What to mind when a value is carried over."""


def ours(key: str) -> list[str]:
    """Return our names for VeRL-Omni's ``key``, however much of its path is given; empty if it has none.

    The whole path wins over its end (``rollout.n``), and that over the last word alone (``ppo_mini_batch_size``).
    """
    ends = {name: theirs for name, theirs in VERL_OMNI.items() if any(_ends_with(path, key) for path in theirs)}
    if ends:
        return sorted(ends)
    word = key.rpartition(".")[2]
    return sorted(name for name, theirs in VERL_OMNI.items() if any(path.rpartition(".")[2] == word for path in theirs))


def _ends_with(path: str, key: str) -> bool:
    return path == key or path.endswith("." + key)
