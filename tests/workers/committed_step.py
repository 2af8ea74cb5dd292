"""A run folder with a committed step of a tiny model, as rollout and advantage stages leave it."""

from pathlib import Path
from typing import Any

import torch

from tests.unit.training import tiny
from verl_omni_core.batches.tables import build_table
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.workers.commands import UpdateCommand

PACK = 4


def config(pipeline: Path, **training: Any) -> RunConfig:
    """Settings that fit :mod:`tests.unit.training.tiny`; keywords with a dot-free group prefix go elsewhere."""
    algorithm = {"max_ratio_deviation": 1e-4, **training.pop("algorithm", {})}
    lora = {"rank": 4, "alpha": 8, **training.pop("lora", {})}
    return RunConfig.model_validate(
        {
            "run": {"seed": 5, "deterministic": training.pop("deterministic", False), "steps": 4},
            "model": {"path": str(pipeline), "lora": lora},
            "sampler": {
                "height": tiny.HEIGHT,
                "width": tiny.WIDTH,
                "num_inference_steps": tiny.STEPS,
                "grid": "uniform",
                "noise_level": 0.7,
            },
            "rollout": {"pack_size": PACK},
            "weights": training.pop("weights", {}),
            "algorithm": algorithm,
            "training": {"micro_batch": 4, "threads": 1, "learning_rate": 1e-3, **training},
        }
    )


def commit_step(
    root: Path,
    pipeline: Path,
    step: int,
    *,
    invalid: tuple[int, ...] = (),
    lost: tuple[int, ...] = (),
    infinite: tuple[int, ...] = (),
    version: int | None = None,
    epoch: int = 0,
) -> tuple[ArtifactRef, ArtifactRef]:
    """Commit ``trajectories``, ``embeddings`` and ``advantages`` of ten samples in shards of four.

    Args:
        infinite: samples whose latents are not finite.
        version: that drew the samples by their own account; none: ``step - 1``.
        epoch: fence epoch of the run's owner.
    """
    version = step - 1 if version is None else version
    root.mkdir(exist_ok=True)
    store = RunStore(root, epoch=epoch)
    batch = tiny.batch(pipeline, seed=step)
    rows, steps = batch["rows"], batch["rows"]["steps"]
    rows["all_latents"][list(infinite)] = float("inf")
    attempt = store.attempt(step, "rollout", f"key-{step}")
    files = []
    kept = [i for i in range(tiny.ROWS) if i not in lost]
    for shard, start in enumerate(range(0, tiny.ROWS, PACK)):
        own = [i for i in kept if start <= i < start + PACK]
        table = {
            **identity(own),
            "prompt_key": [f"p{i % 3}" for i in own],
            "seed": own,
            "status": ["ok"] * len(own),
            "attempts": [1] * len(own),
            "replica": ["r0"] * len(own),
            "min_version": [version] * len(own),
            "max_version": [version] * len(own),
            "num_turns": [1] * len(own),
            "num_preempted": [-1] * len(own),
            **{name: [0.0] * len(own) for name in ("t_generate_s", "t_tool_s", "t_score_s")},
            "all_latents": rows["all_latents"][own],
            "all_timesteps": steps["all_timesteps"][own],
            "step_indices": steps["step_indices"][own],
            "rollout_log_probs": steps["rollout_log_probs"][own],
        }
        files.append(attempt.write_table("trajectories", shard, build_table("trajectories", table)))
    told = batch["conditioning"]
    embeddings = {
        "prompt_key": [f"p{i}" for i in range(3)],
        "encoder_digest": ["e"] * 3,
        "prompt_embeds": list(told["prompt_embeds"]),
        "prompt_embeds_len": [93] * 3,
        "pooled_prompt_embeds": told["pooled_prompt_embeds"],
    }
    files.append(attempt.write_table("embeddings", 0, build_table("embeddings", embeddings)))
    rollout = attempt.commit(files, rows=len(kept), parents=[], producer={})
    attempt = store.attempt(step, "advantage", f"key-{step}")
    advantages = {
        **identity(kept),
        **{name: [0.0] * len(kept) for name in ("score", "group_mean", "group_std")},
        "advantage": [float("nan") if i in invalid else float(rows["advantages"][i]) for i in kept],
        "estimator": ["test"] * len(kept),
        "valid": [i not in invalid for i in kept],
    }
    record = attempt.write_table("advantages", 0, build_table("advantages", advantages))
    return rollout, attempt.commit([record], rows=len(kept), parents=[rollout], producer={})


def identity(rows: list[int]) -> dict[str, list]:
    return {
        "sample_index": rows,
        "sample_id": [f"s{i}" for i in rows],
        "uid": [f"u{i % 3}" for i in rows],
        "session": [i // 3 for i in rows],
    }


def command(root: Path, refs: tuple[ArtifactRef, ArtifactRef], step: int, **changes: Any) -> UpdateCommand:
    values: dict[str, Any] = {
        "root": str(root),
        "step": step,
        "epoch": 1,
        "expected_version": step - 1,
        "rollout": refs[0],
        "advantages": refs[1],
        "old_log_probs": None,
        "reference": None,
        "mini_batches": [list(range(5)), list(range(5, 10))],
    }
    return UpdateCommand(**values | changes)


def weights(worker: Any, folder: Path, network: str = "policy") -> tuple[str, dict[str, torch.Tensor]]:
    from verl_omni_core.weights.filesystem import read_update

    written = worker.update_weights(str(folder), network)
    return written.checksum, dict(read_update(folder, written.version).tensors)
