"""The trainer's network without weights: what tells whether a checkpoint fits settings, before anything starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import LoraConfig
from torch import nn

from verl_omni_core.errors import ConfigError
from verl_omni_core.settings import resolve
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.settings.training import TrainingSettings
from verl_omni_core.training import lora
from verl_omni_core.training.checkpoint import read_index, refuse_other_policy


@dataclass(frozen=True)
class Outline:
    """A trainer as its settings describe it; parameters are on the meta device."""

    module: nn.Module
    training: TrainingSettings
    lora_config: LoraConfig | None
    ema: bool | None
    """True where it keeps an average of the policy, else none."""

    @classmethod
    def of(cls, config: RunConfig) -> "Outline":
        """Return the outline of a run's trainer. Loads no weights.

        Raises:
            ConfigError: adapters that fit nothing, or a model that cannot be read.
        """
        adapter = resolve.adapter(config)
        module = adapter.outline_denoiser(str(resolve.model_path(config)))
        algorithm = resolve.component("algorithm", config.algorithm.name)
        settings, lora_config = config.model.lora, None
        if settings.rank:
            lora_config = lora.add_adapters(
                module,
                settings,
                adapter.facts.lora_targets,
                seed=config.run.seed,
                extra=getattr(algorithm, "ADAPTERS", ()),
            )
        return cls(module, config.training, lora_config, None if config.training.ema_decay is None else True)

    def shapes(self) -> dict[str, list[int]]:
        """Return the shape of each trained parameter, by the name that a checkpoint has for it."""
        named = self.module.named_parameters()
        return {f"model.{n}": list(p.shape) for n, p in named if self.lora_config is None or ".lora_" in n}


def refuse_other_network(folder: Path, config: RunConfig) -> None:
    """Refuse a checkpoint that a trainer with these settings cannot load. Reads no tensor.

    Args:
        folder: of the checkpoint.
    Raises:
        ConfigError: it is of another model, rank, optimizer or set of adapters; says what differs.
        StoreError: it is no checkpoint.
    """
    index, outline = read_index(folder), Outline.of(config)
    refuse_other_policy(outline, index, folder)
    there = {name: shape for name, shape in _shapes(index).items() if name.startswith("model.")}
    here = outline.shapes()
    odd = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if odd:
        name = odd[0]
        raise ConfigError(
            f"checkpoint {str(folder)!r} is of another network than model.path {config.model.path!r}: {len(odd)} "
            f"tensors differ, first {name}: shape {there.get(name)} there, {here.get(name)} here; use the settings it "
            "was written with, or start a new run"
        )


def _shapes(index: Mapping[str, Any]) -> Mapping[str, list[int]]:
    shapes: Mapping[str, list[int]] = index["tensors"]
    return shapes
