"""A tiny SD3 with trajectories of its own, and what the training tests compute on it; spawned ranks import it too."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from verl_omni_core import registry
from verl_omni_core.algorithms._contract import Current, LossOutput
from verl_omni_core.models._contract import Schedule
from verl_omni_core.samplers._denoise import denoise
from verl_omni_core.settings.model import LoraSettings, ModelSettings
from verl_omni_core.settings.training import TrainingSettings
from verl_omni_core.training.losses import diffusion_loss
from verl_omni_core.training.ppo_engine import PPODiffusersFSDPEngine
from verl_omni_core.training.ranks import Ranks
from verl_omni_core.training.replay import Denoising

STEPS, WINDOW, ROWS = 4, (0, 2), 10
HEIGHT, WIDTH = 32, 48

_NO_DIVERGENCE = SimpleNamespace(kl_coef=0.0)
ADAPTER = registry.component("model", "sd3").build(None)


def denoising(path: str | Path, guidance_scale: float = 1.0) -> Denoising:
    geometry = ADAPTER.geometry(HEIGHT, WIDTH, {"block_out_channels": [8] * 4, "latent_channels": 16})
    schedule = ADAPTER.schedule(geometry, STEPS, ADAPTER.scheduler_config(str(path)), "uniform")
    rule = registry.component("sampler", "flow_sde")
    return Denoising(rule, {}, Schedule(schedule.sigmas, schedule.timesteps), 0.7, guidance_scale)


def engine(path: str | Path, *, rank: int = 4, ranks: Ranks | None = None, warm: str | None = None, **settings: Any):
    """A built engine; ``settings`` are TrainingSettings' or the engine's own."""
    own = {k: settings.pop(k) for k in ("deterministic", "reference", "extra_adapters", "total_steps") if k in settings}
    lora = {k: settings.pop(k) for k in ("targets", "exclude", "alpha", "init") if k in settings}
    if "lora_dtype" in settings:
        lora["dtype"] = settings.pop("lora_dtype")
    dtype = settings.pop("dtype", "float32")
    model = ModelSettings(
        path=str(path), dtype=dtype, lora=LoraSettings(rank=rank, adapter_path=warm, **{"alpha": 8, **lora})
    )
    made = PPODiffusersFSDPEngine(model, TrainingSettings(**settings), ADAPTER, ranks=ranks, seed=5, **own)
    made.initialize()
    made.set_denoising(denoising(path))
    return made


def stir(made: PPODiffusersFSDPEngine, scale: float = 0.05) -> None:
    """Give lora_B a size, so that every adapter tensor has a gradient; equal for any number of ranks."""
    from verl_omni_core.training import sharding

    for name, parameter in made.trainable.items():
        if "lora_B" in name:
            generator = torch.Generator().manual_seed(len(name))
            values = torch.randn(parameter.shape, generator=generator) * scale
            if hasattr(parameter, "placements"):
                from torch.distributed.tensor import distribute_tensor

                values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
            sharding.local(parameter).copy_(sharding.local(values))


def batch(
    path: str | Path,
    rows: int = ROWS,
    seed: int = 3,
    guided: bool = False,
    module: torch.nn.Module | None = None,
    dtype: torch.dtype = torch.float32,
) -> TensorDict:
    """Trajectories with advantages and old log-probs, three prompts.

    Args:
        module: that draws them, in ``dtype``; none: the base network.
    """
    module = module or ADAPTER.load_denoiser(str(path), dtype)
    generator = torch.Generator().manual_seed(seed)
    names = {"prompt_embeds": (93, 32), "pooled_prompt_embeds": (64,)}
    if guided:
        names |= {f"negative_{name}": shape for name, shape in names.items()}
    conditioning = {name: torch.randn(3, *shape, generator=generator) for name, shape in names.items()}
    prompt_index = torch.arange(rows) % 3
    how = denoising(path, 2.0 if guided else 1.0)

    def velocity(latents: Tensor, timestep: Tensor, _: int) -> Tensor:
        told = {name: value[prompt_index].to(dtype) for name, value in conditioning.items()}
        return ADAPTER.velocity(module, latents, timestep, told, how.guidance_scale)

    trajectory = denoise(
        velocity,
        torch.randn(rows, 16, HEIGHT // 8, WIDTH // 8, generator=generator),
        how.schedule,
        how.rule,
        {},
        noise_level=how.noise_level,
        window=WINDOW,
        generators=[torch.Generator().manual_seed(100 + i) for i in range(rows)],
    )
    width = WINDOW[1] - WINDOW[0]
    steps = {
        "step_indices": trajectory.step_indices.expand(rows, -1).contiguous(),
        "all_timesteps": trajectory.all_timesteps,
        "rollout_log_probs": trajectory.log_probs,
        "old_log_probs": trajectory.log_probs,
    }
    data = {
        "all_latents": trajectory.all_latents,
        "prompt_index": prompt_index,
        "weight": torch.ones(rows),
        "advantages": torch.linspace(-1.5, 2.0, rows),
        "steps": TensorDict(steps, [rows, width]),
    }
    return TensorDict({"rows": TensorDict(data, [rows]), "conditioning": TensorDict(conditioning, [3])}, [])


def take(source: TensorDict, rows: list[int]) -> TensorDict:
    """The rows of a rank; none: one row of weight 0, as workers do."""
    chosen = source["rows"][rows or [0]].clone()
    if not rows:
        chosen["weight"] = torch.zeros(1)
    return TensorDict({"rows": chosen, "conditioning": source["conditioning"]}, [])


def policy_gradient(options: Any = _NO_DIVERGENCE, *, bypass: bool = False) -> Any:
    """The ratio loss of FlowGRPO, unclipped, with the divergence to a reference where asked."""

    def loss(current: Current, stored: Mapping[str, Tensor], options: Any) -> LossOutput:
        ratio = torch.exp(current.log_probs - stored["old_log_probs"])
        value = -stored["advantages"] * ratio
        metrics = {"actor/ratio_mean": ratio.detach(), "actor/ratio_std": ratio.detach()}
        if options.kl_coef:
            gap = (current.prev_sample_mean - stored["ref_prev_sample_mean"]).square().flatten(1).mean(1)
            divergence = gap / (2 * current.std_dev_t.square())
            value = value + options.kl_coef * divergence
            metrics["actor/kl_loss"] = divergence.detach()
        return LossOutput(value, metrics)

    return diffusion_loss(SimpleNamespace(EVALUATION="replay", REQUIRES=(), loss=loss), options, bypass=bypass)


def gradients(made: PPODiffusersFSDPEngine) -> dict[str, Tensor]:
    from verl_omni_core.training import sharding

    return {n: sharding.full(p.grad) for n, p in made.trainable.items() if p.grad is not None}


def parameters(made: PPODiffusersFSDPEngine) -> dict[str, Tensor]:
    named, _ = made.get_per_tensor_param()
    return {name: tensor.clone() for name, tensor in named}


def per_tensor(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Largest difference of a tensor in units of its norm."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).norm() / b[n].norm().clamp_min(1e-12)) for n in b)


def relative(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Difference of two gradients in units of the norm of the second."""
    assert a.keys() == b.keys()
    difference = sum(float((a[n] - b[n]).double().square().sum()) for n in b)
    return (difference / sum(float(b[n].double().square().sum()) for n in b)) ** 0.5
