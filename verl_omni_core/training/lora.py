"""peft LoRA on a denoiser: building, warm start, and named policy adapters.

``default`` is the policy and the only adapter that trains. Others (``old``) hold earlier states of it; ``reference`` is
no adapter at all but the network without any.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from verl_omni_core.errors import ConfigError, ContractError
from verl_omni_core.given_files import json_object, tensors
from verl_omni_core.registry import nearest
from verl_omni_core.settings.model import LoraSettings
from verl_omni_core.training.ranks import seeded
from verl_omni_core.training.sharding import local, reshard

POLICY = "default"
REFERENCE = "reference"
ADAPTER_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_PREFIXES = ("base_model.model.", "transformer.")


def add_adapters(
    module: nn.Module,
    settings: LoraSettings,
    default_targets: tuple[str, ...],
    *,
    seed: int,
    extra: tuple[str, ...] = (),
) -> LoraConfig:
    """Freeze ``module``, put adapters into it and return their common configuration.

    Args:
        module: the unsharded network; on the meta device it only tells whether the settings fit.
        default_targets: module name suffixes used where the settings name none.
        seed: of ``lora_A``; equal on all ranks.
        extra: names of further adapters, equal to ``default`` at first and never trained.
    Raises:
        ConfigError: a pattern that matches no module, no module left, or a warm-start adapter that does not fit.
    """
    warm = read_adapter(settings.adapter_path) if settings.adapter_path else None
    targets = settings.targets or (list(warm[1]["target_modules"]) if warm else list(default_targets))
    _check_patterns(module, targets, settings.exclude)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        init_lora_weights="gaussian" if settings.init == "gaussian" else True,
        target_modules=targets,
        exclude_modules=settings.exclude or None,
        bias="none",
    )
    module.requires_grad_(False)
    dtype = getattr(torch, settings.dtype)
    for name in (POLICY, *extra):
        with seeded(seed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several adapters are the point
            inject_adapter_in_model(config, module, name)
    for name, parameter in module.named_parameters():
        if any(_belongs(name, adapter) for adapter in (POLICY, *extra)):
            parameter.data = parameter.data.to(dtype)
    if warm is not None:
        _warm_start(module, settings, *warm)
        for name in extra:
            _pairwise(module, POLICY, name, lambda target, source: target.copy_(source))
    _activate(module, POLICY)
    return config


def read_adapter(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a peft adapter folder: tensors by module name without a model prefix, and its configuration.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    paths = [Path(folder, CONFIG_FILE), Path(folder, ADAPTER_FILE)]
    for path in paths:
        if not path.is_file():
            raise ConfigError(
                f"model.lora.adapter_path: {str(path)!r} does not exist; give a folder with {CONFIG_FILE} and "
                f"{ADAPTER_FILE}"
            )
    try:
        config, named = json_object(paths[0]), tensors(paths[1])
    except ConfigError as error:
        raise ConfigError(f"model.lora.adapter_path: {error}") from error
    if not isinstance(config.get("target_modules"), list):
        raise ConfigError(
            f"model.lora.adapter_path: {str(paths[0])!r} lists no target_modules; give the folder that peft's "
            "save_pretrained, or verl-omni export, wrote"
        )
    return {_stripped(name): tensor for name, tensor in named.items()}, config


def adapter_parameters(module: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """Return an adapter's parameters by peft's state-dict names, which do not name the adapter.

    Raises:
        ContractError: the module has no such adapter.
    """
    found = {
        name.replace(f".{adapter}.weight", ".weight"): parameter
        for name, parameter in module.named_parameters()
        if _belongs(name, adapter)
    }
    if not found:
        raise ContractError(f"there is no adapter {adapter!r}; this network has {adapter_names(module)}")
    return found


def adapter_names(module: nn.Module) -> list[str]:
    """Return the names of all adapters of ``module``, sorted."""
    return sorted({name for layer in module.modules() if isinstance(layer, LoraLayer) for name in layer.lora_A})


def peft_config(config: LoraConfig) -> dict[str, Any]:
    """Return the configuration as JSON, lists sorted, so that equal adapters give equal files."""
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return values | {"inference_mode": True, "base_model_name_or_path": None}


class LoRAAdapterMixin:
    """Named policy adapters of ``self.module``. Whatever happens inside a context, ``default`` is active after it."""

    module: nn.Module

    @torch.no_grad()
    def copy_adapter(self, source: str, target: str) -> None:
        """Make ``target`` equal to ``source``, paired by name; each rank copies its own shard.

        Raises:
            ContractError: an adapter does not exist, or the two differ in names or shapes.
        """
        _pairwise(self.module, source, target, lambda to, origin: to.copy_(origin))

    @torch.no_grad()
    def ema_update_adapter(self, source: str, target: str, decay: float) -> None:
        """Move ``target`` to ``decay * target + (1 - decay) * source``, paired by name.

        Raises:
            ValueError: decay outside 0 to 1. ContractError: as for :meth:`copy_adapter`.
        """
        if not 0 <= decay <= 1:
            raise ValueError(f"decay is {decay}; an average needs one from 0 (copy) to 1 (keep)")
        _pairwise(self.module, source, target, lambda to, origin: to.mul_(decay).add_(origin, alpha=1 - decay))

    @contextmanager
    def use_adapter(self, name: str) -> Iterator[None]:
        """Compute with another adapter inside; ``reference`` is the network without any."""
        if name == REFERENCE:
            with self.disable_adapter():
                yield
            return
        if name not in adapter_names(self.module):
            raise ContractError(f"there is no adapter {name!r}; this network has {adapter_names(self.module)}")
        try:
            _activate(self.module, name)
            yield
        finally:
            _activate(self.module, POLICY)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Compute with the base weights alone inside."""
        if not adapter_names(self.module):
            raise ContractError(
                "this network has no adapters to disable; with all parameters trained use the frozen copy"
            )
        try:
            _enable(self.module, False)
            yield
        finally:
            _enable(self.module, True)
            _activate(self.module, POLICY)


def _activate(module: nn.Module, name: str) -> None:
    reshard(module)
    for layer in module.modules():
        if isinstance(layer, LoraLayer):
            layer.set_adapter(name)
    _assert_trainable(module)


def _enable(module: nn.Module, enabled: bool) -> None:
    reshard(module)
    for layer in module.modules():
        if isinstance(layer, LoraLayer):
            layer.enable_adapters(enabled)
    _assert_trainable(module)


def _assert_trainable(module: nn.Module) -> None:
    # peft moves requires_grad along with the active adapter; the optimizer knows `default` alone. Set at once, before
    # a forward pass can exchange sharded for gathered parameters, which carry flags of their own.
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(_belongs(name, POLICY))


def _belongs(name: str, adapter: str) -> bool:
    return ".lora_" in name and f".{adapter}." in name


def _pairwise(module: nn.Module, source: str, target: str, change: Callable[[Tensor, Tensor], object]) -> None:
    reshard(module)
    sources, targets = adapter_parameters(module, source), adapter_parameters(module, target)
    if {n: p.shape for n, p in sources.items()} != {n: p.shape for n, p in targets.items()}:
        odd = sorted(set(sources) ^ set(targets)) or [n for n in sources if sources[n].shape != targets[n].shape]
        raise ContractError(f"adapters {source!r} and {target!r} differ at {odd[:3]}; give them one configuration")
    for name, parameter in targets.items():
        change(local(parameter), local(sources[name]))


def _check_patterns(module: nn.Module, targets: list[str], exclude: list[str]) -> None:
    names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    for key, patterns in (("targets", targets), ("exclude", exclude)):
        for pattern in patterns:
            if not any(_matches(name, pattern) for name in names):
                tails = sorted({re.sub(r"^.*?\.\d+\.", "", name) for name in names})
                raise ConfigError(
                    f"model.lora.{key}: {pattern!r} matches no linear module of {type(module).__name__}; "
                    f"{nearest(pattern, tails)}"
                )
    if not any(
        any(_matches(name, pattern) for pattern in targets) and not any(_matches(name, pattern) for pattern in exclude)
        for name in names
    ):
        raise ConfigError(f"model.lora.exclude {exclude} leaves no module of model.lora.targets {targets}; shorten it")


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}")


def _warm_start(
    module: nn.Module, settings: LoraSettings, tensors: dict[str, Tensor], config: Mapping[str, Any]
) -> None:
    for key, value in (("r", settings.rank), ("lora_alpha", settings.alpha)):
        if config.get(key) != value:
            setting = {"r": "rank", "lora_alpha": "alpha"}[key]
            raise ConfigError(
                f"model.lora.{setting} is {value}, but the adapter in {settings.adapter_path!r} has {key} = "
                f"{config.get(key)}; set model.lora.{setting} to that"
            )
    load_adapter(module, tensors, where=f"model.lora.adapter_path {settings.adapter_path!r}")


@torch.no_grad()
def load_adapter(module: nn.Module, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Copy tensors into the ``default`` adapter of an unsharded module.

    Raises:
        ConfigError: a tensor is missing, unexpected or of another shape.
    """
    parameters = adapter_parameters(module, POLICY)
    missing, unexpected = sorted(set(parameters) - set(tensors)), sorted(set(tensors) - set(parameters))
    if missing or unexpected:
        raise ConfigError(
            f"{where}: the adapter does not fit: {len(missing)} tensors missing {missing[:2]}, {len(unexpected)} "
            f"unexpected {unexpected[:2]}; use the targets and excludes it was trained with"
        )
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise ConfigError(
                f"{where}: {name} has shape {tuple(tensors[name].shape)}, expected {tuple(parameter.shape)}; it is an "
                "adapter of another model or rank"
            )
        parameter.copy_(tensors[name])


def _stripped(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
