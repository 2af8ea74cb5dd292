"""Names of adapter tensors, and the checks that every engine makes before it takes new weights."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from verl_omni_core.errors import ContractError
from verl_omni_core.rollout._contract import WeightUpdate

_PREFIXES = ("base_model.model.", "transformer.")
_UNSUPPORTED = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")


def strip_prefix(name: str) -> str:
    """Return an adapter tensor's name without peft's and diffusers' model prefixes."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def lora_modules(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return module name to its ``A`` [r, in] and ``B`` [out, r].

    Raises:
        ContractError: a name that is no ``lora_A`` or ``lora_B`` weight, half a pair, or no tensor at all.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, found, rest = strip_prefix(name).rpartition(".lora_")
        side = rest.removesuffix(".weight").removesuffix(".default")
        if not found or side not in ("A", "B"):
            raise ContractError(f"{name!r} is no lora_A or lora_B weight; send peft's state dict of the adapter alone")
        modules.setdefault(module, {})[side] = tensor
    halves = sorted(module for module, pair in modules.items() if len(pair) != 2)
    if halves or not modules:
        raise ContractError(f"expected lora_A and lora_B of at least one module, got {len(modules)} modules, of which "
                            f"incomplete: {halves}; send both weights of every module")  # fmt: skip
    return modules


def check_update(update: WeightUpdate) -> None:
    """Refuse an update of unknown kind, without tensors, or of an adapter form that the engines do not compute.

    Raises:
        ContractError: see above.
    """
    if update.kind not in ("lora", "full"):
        raise ContractError(f"weight update is of kind {update.kind!r}; use 'lora' or 'full'")
    if not update.tensors:
        raise ContractError(f"weight update {update.version} holds no tensor; send the parameters of the policy")
    if update.kind == "full":
        return
    config = update.peft_config or {}
    peft_fields(config, [])
    asked = [name for name in _UNSUPPORTED if config.get(name)]
    if asked:
        raise ContractError(f"the adapter uses {asked}, which the engines do not compute; use one rank and scale")


def check_bound(expected: Iterable[str], bound: Iterable[str], what: str) -> int:
    """Return how many names were bound.

    Raises:
        ContractError: not all of ``expected``; names the first missing ones. Samples would silently come from other
            weights than the trainer's.
    """
    wanted, have = set(expected), set(bound)
    missing = sorted(wanted - have)
    if missing or not wanted:
        raise ContractError(
            f"only {len(wanted & have)} of {len(wanted)} {what} exist in the engine's network, missing: "
            f"{_first(missing)}; check model.lora.targets and the engine's pipeline class"
        )
    return len(wanted)


def peft_fields(config: Mapping[str, Any] | None, modules: Sequence[str]) -> dict[str, Any]:
    """Return the part of a peft config that engines need, with the modules that the tensors name as targets.

    Raises:
        ContractError: there is no config, or one without rank and alpha.
    """
    if config is None or not {"r", "lora_alpha"} <= config.keys():
        raise ContractError(f"a lora update needs peft_config with r and lora_alpha, got {config}; send peft's config")
    return {
        "r": int(config["r"]),
        "lora_alpha": config["lora_alpha"],
        "target_modules": sorted(modules),
        "use_rslora": bool(config.get("use_rslora", False)),
    }


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
