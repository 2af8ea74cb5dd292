"""Trained weights for other programs: a LoRA folder for diffusers and peft, or a whole pipeline."""

import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from verl_omni_core.errors import ConfigError, ContractError
from verl_omni_core.models._contract import DenoiserAdapter
from verl_omni_core.training import lora

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
_COMPONENT = "transformer"
_DENOISER_WEIGHTS = ("diffusion_pytorch_model*", "model*.safetensors", "*.bin")
_TOLERANCE = {"peft": 1e-5, "diffusers": 1e-4}
"""Largest difference by format, as a share of the largest velocity; merging rounds each weight once."""


@dataclass(frozen=True)
class ForwardInputs:
    """One forward pass of a denoiser: latents [1, ...] and timestep [1] fp32, conditioning [1, ...]."""

    latents: Tensor
    timestep: Tensor
    conditioning: Mapping[str, Tensor]


def export_adapter(folder: str | Path, tensors: Mapping[str, Tensor], peft_config: Mapping[str, Any]) -> None:
    """Write an adapter folder that stock libraries load.

    ``pipe.load_lora_weights(folder)`` takes one file, ``PeftModel.from_pretrained(transformer, folder)`` the other two.

    Args:
        tensors: by peft's names without a model prefix. peft_config: as it is written to ``adapter_config.json``.
    Raises:
        ConfigError: the folder exists and is not empty.
    """
    folder = _fresh(folder)
    tensors = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
    save_file({f"base_model.model.{n}": t for n, t in tensors.items()}, folder / lora.ADAPTER_FILE, {"format": "pt"})
    (folder / lora.CONFIG_FILE).write_text(json.dumps(dict(peft_config), indent=2, sort_keys=True) + "\n")
    # diffusers takes alpha and targets from the header of its own file; without them it assumes alpha = rank
    known = {f"{_COMPONENT}.{key}": value for key, value in peft_config.items() if value is not None}
    header = {"format": "pt", "lora_adapter_metadata": json.dumps(known, indent=2, sort_keys=True)}
    save_file({f"{_COMPONENT}.{n}": t for n, t in tensors.items()}, folder / DIFFUSERS_FILE, header)


def export_pipeline(
    folder: str | Path,
    adapter: DenoiserAdapter,
    base: str | Path,
    tensors: Mapping[str, Tensor],
    peft_config: Mapping[str, Any] | None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write a pipeline folder in diffusers format with the trained denoiser in place of the base's.

    Args:
        base: pipeline folder that training started from.
        tensors: of an adapter, with its ``peft_config``; or of all parameters by diffusers' names, with none.
        dtype: in which the denoiser is written.
    Raises:
        ConfigError: the folder is in use. ContractError: tensors that do not fit the base.
    """
    folder = _fresh(folder)
    denoiser = adapter.load_denoiser(str(base), torch.float32)
    if peft_config is None:
        _replace(denoiser, tensors)
    else:
        merge(denoiser, tensors, peft_config)
    shutil.copytree(base, folder, dirs_exist_ok=True, ignore=_without_denoiser_weights(Path(base)))
    if dtype != torch.float32:
        denoiser.to(dtype)
    denoiser.save_pretrained(folder / _COMPONENT)


@torch.no_grad()
def verify(
    folder: str | Path,
    adapter: DenoiserAdapter,
    base: str | Path,
    tensors: Mapping[str, Tensor],
    peft_config: Mapping[str, Any] | None,
    inputs: ForwardInputs,
    *,
    format: Literal["peft", "diffusers"],
) -> float:
    """Load an exported folder as stock libraries do and compare a forward pass with that of the trained network.

    An adapter is loaded by diffusers and by peft, into the base; all its tensors must arrive, and no others.

    Args:
        folder: as :func:`export_adapter` (``peft``) or :func:`export_pipeline` (``diffusers``) wrote it.
        base, tensors, peft_config: what was exported.
    Returns: the largest absolute difference of the velocity.
    Raises:
        ContractError: a tensor is missing, left over or different, or the velocity differs by more than rounding.
    """

    def velocity(network: nn.Module) -> Tensor:
        for parameter in network.parameters():
            parameter.data = parameter.data.float()
        return adapter.velocity(network, inputs.latents, inputs.timestep, inputs.conditioning, 1.0)

    denoiser = adapter.load_denoiser(str(base), torch.float32)
    if peft_config is None:
        _replace(denoiser, tensors)
    else:
        lora_config = _inject(denoiser, peft_config)
        lora.load_adapter(denoiser, tensors, where=f"adapter of rank {lora_config.r}")
    expected = velocity(denoiser)
    del denoiser
    if format == "diffusers":
        loaded = {"diffusers": velocity(adapter.load_denoiser(str(folder), torch.float32))}
    else:
        loaded = {
            "diffusers": velocity(_loaded_by_diffusers(folder, adapter, base, tensors)),
            "peft": velocity(_loaded_by_peft(folder, adapter, base, tensors)),
        }
    largest = 0.0
    limit = _TOLERANCE[format] * float(expected.abs().max())
    for library, found in loaded.items():
        difference = float((found - expected).abs().max())
        if not difference <= limit:
            raise ContractError(
                f"the exported files give another velocity through {library}: {difference:.3g} off, expected at most "
                f"{limit:.3g}; the versions of {library} and peft here do not read what was trained"
            )
        largest = max(largest, difference)
    return largest


def _loaded_by_diffusers(
    folder: str | Path, adapter: DenoiserAdapter, base: str | Path, tensors: Mapping[str, Tensor]
) -> nn.Module:
    denoiser: Any = adapter.load_denoiser(str(base), torch.float32)
    denoiser.load_lora_adapter(str(folder), weight_name=DIFFUSERS_FILE, adapter_name=lora.POLICY)
    _compare(lora.adapter_parameters(denoiser, lora.POLICY), tensors, "diffusers")
    return denoiser


def _loaded_by_peft(
    folder: str | Path, adapter: DenoiserAdapter, base: str | Path, tensors: Mapping[str, Tensor]
) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # how peft tells of missing keys
        model = PeftModel.from_pretrained(adapter.load_denoiser(str(base), torch.float32), str(folder))
    denoiser: nn.Module = model.base_model.model
    _compare(lora.adapter_parameters(denoiser, lora.POLICY), tensors, "peft")
    return denoiser.eval()


def _compare(found: Mapping[str, Tensor], tensors: Mapping[str, Tensor], library: str) -> None:
    odd = sorted(found.keys() ^ tensors.keys())
    if odd:
        raise ContractError(f"{library} loads the adapter with {len(odd)} keys missing or left over, first {odd[:3]}")
    for name, tensor in tensors.items():
        if not torch.equal(found[name].to(tensor.dtype), tensor):
            raise ContractError(f"{library} loads other numbers into {name!r} than were trained")


@torch.no_grad()
def merge(denoiser: nn.Module, tensors: Mapping[str, Tensor], peft_config: Mapping[str, Any]) -> None:
    """Add an adapter to the weights of a denoiser in place, and leave no trace of peft in it.

    Raises:
        ContractError: tensors that do not fit.
    """
    _inject(denoiser, peft_config)
    try:
        lora.load_adapter(denoiser, tensors, where="merging")
    except ConfigError as error:
        raise ContractError(str(error)) from error
    for name, layer in list(denoiser.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(denoiser.get_submodule(parent), child, layer.get_base_layer())
    del denoiser.peft_config


def _inject(denoiser: nn.Module, peft_config: Mapping[str, Any]) -> LoraConfig:
    config = LoraConfig(
        r=peft_config["r"],
        lora_alpha=peft_config["lora_alpha"],
        target_modules=list(peft_config["target_modules"]),
        exclude_modules=peft_config.get("exclude_modules"),
        bias="none",
    )
    inject_adapter_in_model(config, denoiser, lora.POLICY)
    return config


@torch.no_grad()
def _replace(denoiser: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    parameters = dict(denoiser.named_parameters())
    odd = sorted(parameters.keys() ^ tensors.keys())
    if odd:
        raise ContractError(
            f"{len(odd)} tensors are missing or unexpected, first {odd[:3]}; these are not this model's"
        )
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def _without_denoiser_weights(base: Path) -> Any:
    chosen = shutil.ignore_patterns(*_DENOISER_WEIGHTS)
    return lambda folder, names: chosen(folder, names) if Path(folder) == base / _COMPONENT else set()


def _fresh(folder: str | Path) -> Path:
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{str(folder)!r} exists and is not empty; export to a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
