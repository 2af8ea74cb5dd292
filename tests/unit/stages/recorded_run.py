"""A run's folder with committed weights of a tiny network, made by hand: no flow, no actor, no engine."""

import json
from pathlib import Path

import torch
from torch import Tensor

from tests.unit.training import tiny
from verl_omni_core.rollout._contract import WeightUpdate
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.runs import create_run
from verl_omni_core.weights.checksum import checksum
from verl_omni_core.weights.filesystem import write_update


def settings(store: Path, pipeline: Path, *, rank: int = 4, ema_decay: float | None = 0.9) -> RunConfig:
    """Settings that could have made the run."""
    prompts = store / "prompts.jsonl"
    store.mkdir(parents=True, exist_ok=True)
    prompts.write_text("".join(json.dumps({"prompt": f"sign {i}", "ground_truth": str(i)}) + "\n" for i in range(3)))
    return RunConfig.model_validate(
        {
            "run": {"store": str(store)},
            "model": {"path": str(pipeline), "lora": {"rank": rank, "alpha": 8}},
            "data": {"train": "gone.parquet", "validation": str(prompts)},
            "sampler": {"height": tiny.HEIGHT, "width": tiny.WIDTH},
            "rollout": {"name": "diffusers", "group_size": 2},
            "training": {"ema_decay": ema_decay},
        }
    )


def trained(pipeline: Path, rank: int, scale: float) -> WeightUpdate:
    """Weights as a trainer hands them out, moved away from the base by ``scale``."""
    made = tiny.engine(pipeline, rank=rank)
    if rank:
        tiny.stir(made, scale=scale)
    else:
        with torch.no_grad():
            made.module.proj_out.weight.mul_(1 + scale)
    named, config = made.get_per_tensor_param()
    tensors: dict[str, Tensor] = {name: tensor.clone() for name, tensor in named}
    return WeightUpdate(0, "lora" if config else "full", tensors, config)


def record(config: RunConfig, run_id: str, weights: dict[tuple[int, str], WeightUpdate]) -> Path:
    """Make the run's folder with weights by (step, stage); return it."""
    folder = create_run(config.run.store, config.model_dump(mode="json"), code_version="1", run_id=run_id)
    store = RunStore(folder.root)
    for (step, stage), update in weights.items():
        attempt = store.attempt(step, stage, "key")
        files = [attempt.add_file(path.name) for path in write_update(attempt.folder, update)]
        facts = {"kind": update.kind, "checksum": checksum(update.tensors), "weights_version": step}
        attempt.commit(files, rows=len(update.tensors), parents=[], producer=facts)
    return folder.root
