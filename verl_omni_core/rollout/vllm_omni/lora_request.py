"""A LoRA request whose weights are tensors in memory."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from vllm_omni.lora.request import LoRARequest


class OmniTensorLoRARequest(LoRARequest, omit_defaults=True, array_like=True):  # type: ignore[call-arg]
    """vLLM's LoRA request plus the adapter itself: nothing is read from ``lora_path``.

    The worker extension turns it into an adapter registered under ``lora_int_id``; use a new id for every policy
    version, because requests that name a registered id use it without loading anything.
    """

    peft_config: dict[str, Any] | None = None
    """``r``, ``lora_alpha``, ``target_modules`` (module names)."""
    lora_tensors: dict[str, Tensor] | None = None
    """peft's state-dict names without a model prefix, to ``lora_A`` [r, in] and ``lora_B`` [out, r]."""

    def reference(self) -> LoRARequest:
        """Return the request without its tensors, as each sample carries it."""
        return LoRARequest(lora_name=self.lora_name, lora_int_id=self.lora_int_id, lora_path=self.lora_path)


class VLLMOmniHijack:
    """The founding documents' name for in-memory LoRA; here a worker extension does it and nothing is replaced."""

    @staticmethod
    def hijack() -> str:
        """Do nothing and say so: any engine that this package starts takes :class:`OmniTensorLoRARequest`.

        Safe to call any number of times, in any process.
        """
        return (
            "nothing to replace: LoRA tensors in memory are loaded by the worker extension "
            "verl_omni_core.rollout.vllm_omni.extension.RolloutWorkerExtension"
        )


def policy_request(
    version: int, serial: int, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None
) -> OmniTensorLoRARequest:
    """Return the request for one policy version.

    Args:
        serial: 1-based count of loads in this engine; the id, because two loads may carry one version.
    """
    return OmniTensorLoRARequest(
        lora_name=f"policy-{version}",
        lora_int_id=serial,
        lora_path=f"memory://policy-{version}",
        peft_config=dict(config or {}),
        lora_tensors=dict(tensors),
    )
