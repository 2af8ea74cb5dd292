"""Export trained weights of a run for other programs, and prove the result before it gets its name."""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from verl_omni_core.errors import ConfigError
from verl_omni_core.settings import resolve
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.trained import Network, TrainedWeights, find_weights
from verl_omni_core.training.export import ForwardInputs, export_adapter, export_pipeline, verify
from verl_omni_core.version import __version__

Format = Literal["peft", "diffusers"]
RECORD = "export.json"
_PROMPT = "a sign that reads ABC"
_NOISE_SEED = 0
_TIMESTEP = 500.0


@dataclass(frozen=True)
class Exported:
    """What an export wrote; stands in the folder as ``export.json``."""

    folder: str
    format: Format
    run_id: str
    step: int
    network: Network
    kind: str
    """``lora`` or ``full``: what was trained."""
    tensors: int
    checksum: str
    """Of the trained tensors, as the trainer took it."""
    largest_difference: float
    """Between the trained network's velocity and that of the written files, loaded by stock libraries."""
    code_version: str = __version__


def export(
    run_id: str,
    out: str | Path,
    *,
    store: str | Path = "runs",
    step: int | None = None,
    network: Network | None = None,
    format: Format | None = None,
) -> Exported:
    """Write trained weights of a run into a new folder.

    The folder appears under its name only after stock libraries have loaded it and computed what was trained.

    Args:
        run_id: a run of ``store``; its flow and its actors need not live.
        out: folder to make.
        step, network: see :func:`verl_omni_core.stages.trained.find_weights`.
        format: ``peft``: an adapter that peft and diffusers load; ``diffusers``: a whole pipeline, the adapter merged.
            None: the adapter, or the pipeline where all parameters were trained.
    Raises:
        ConfigError: no such weights, a folder in use, or an adapter asked of a run that trained none.
        ContractError: stock libraries load the result otherwise than trained; nothing is left under ``out``.
    """
    weights = find_weights(store, run_id, step=step, network=network)
    chosen: Format = format or ("peft" if weights.kind == "lora" else "diffusers")
    if chosen == "peft" and weights.kind != "lora":
        raise ConfigError(
            f"run {run_id!r} trained all parameters (model.lora.rank = 0), so there is no adapter; export the format "
            "'diffusers'"
        )
    out = Path(out).expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{str(out)!r} exists and is not empty; export to a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.part-{os.getpid()}")
    try:
        exported = _write(weights, partial, out, chosen)
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return exported


def _write(weights: TrainedWeights, partial: Path, out: Path, format: Format) -> Exported:
    config, update = weights.config, weights.read()
    adapter, base = resolve.adapter(config), resolve.model_path(config)
    if format == "peft":
        export_adapter(partial, update.tensors, update.peft_config or {})
    else:
        export_pipeline(partial, adapter, base, update.tensors, update.peft_config)
    difference = verify(
        partial, adapter, base, update.tensors, update.peft_config, _inputs(config, base), format=format
    )
    exported = Exported(
        str(out),
        format,
        weights.run_id,
        weights.step,
        weights.network,
        weights.kind,
        len(update.tensors),
        weights.checksum,
        difference,
    )
    (partial / RECORD).write_text(json.dumps(asdict(exported), indent=2) + "\n")
    return exported


def _inputs(config: RunConfig, base: Path) -> ForwardInputs:
    """Return a forward pass of the run's own size, with an encoded prompt."""
    adapter, sampler = resolve.adapter(config), config.sampler
    encoders = adapter.load_encoders(str(base), getattr(torch, config.model.dtype))
    told = adapter.encode(encoders, _PROMPT, None, sampler.max_sequence_length)
    geometry = adapter.geometry(sampler.height, sampler.width, adapter.decoder_config(str(base)))
    latents = adapter.initial_latents(geometry, [torch.Generator().manual_seed(_NOISE_SEED)])
    conditioning = {name: value[None].float() for name, value in told.items()}
    return ForwardInputs(latents, torch.tensor([_TIMESTEP]), conditioning)
