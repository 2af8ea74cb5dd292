"""Policy versions as files: a folder of safetensors that peft and diffusers also read, and that rebuilds a replica."""

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from verl_omni_core import given_files
from verl_omni_core.errors import ConfigError, StoreError
from verl_omni_core.rollout._contract import WeightUpdate
from verl_omni_core.store.durable_files import check_free, storage_errors

_ADAPTER, _ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_FULL = "diffusion_pytorch_model.safetensors"
_PEFT_PREFIX = "base_model.model."


def write_update(folder: str | Path, update: WeightUpdate) -> list[Path]:
    """Write the tensors, and for an adapter its peft config, into ``folder``; returns the files.

    An adapter's folder loads with ``PeftModel.from_pretrained``.

    Raises:
        StoreError: the disk has no room for them, or fills up meanwhile.
    """
    folder = Path(folder)
    check_free(folder, sum(tensor.nbytes for tensor in update.tensors.values()))
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return _write(folder, update)


def _write(folder: Path, update: WeightUpdate) -> list[Path]:
    prefix = _PEFT_PREFIX if update.kind == "lora" else ""
    tensors = {prefix + name: tensor.detach().cpu().contiguous() for name, tensor in update.tensors.items()}
    weights = folder / (_ADAPTER if update.kind == "lora" else _FULL)
    try:
        save_file(tensors, weights)
    except SafetensorError as error:  # of a full disk, too
        raise StoreError(
            f"cannot write {weights}: {error}; free some space and start again, finished stages are kept"
        ) from error
    if update.kind != "lora":
        return [weights]
    config = folder / _ADAPTER_CONFIG
    config.write_text(json.dumps({"peft_type": "LORA", **(update.peft_config or {})}, indent=1, sort_keys=True))
    return [weights, config]


def read_update(folder: str | Path, version: int) -> WeightUpdate:
    """Return what ``folder`` holds, as policy version ``version``.

    Raises:
        StoreError: neither an adapter nor full weights are there, an adapter without its config, or damaged files.
    """
    folder = Path(folder)
    try:
        return _read(folder, version)
    except ConfigError as error:
        raise StoreError(str(error)) from error


def _read(folder: Path, version: int) -> WeightUpdate:
    if (folder / _ADAPTER).is_file():
        if not (folder / _ADAPTER_CONFIG).is_file():
            raise StoreError(f"{str(folder)!r} holds {_ADAPTER} without {_ADAPTER_CONFIG}; write both")
        config = given_files.json_object(folder / _ADAPTER_CONFIG)
        named = given_files.tensors(folder / _ADAPTER)
        tensors = {name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in named.items()}
        return WeightUpdate(version, "lora", tensors, config)
    if (folder / _FULL).is_file():
        return WeightUpdate(version, "full", given_files.tensors(folder / _FULL))
    raise StoreError(f"{str(folder)!r} holds neither {_ADAPTER} nor {_FULL}; give the folder of one policy version")
