"""Methods that the engine's worker gains, reached by RPC: counts, LoRA tensors from memory, full weights.

Every load is checked where the tensors stand: each one that was sent must be, bit for bit in the engine's dtype, in the
layer that computes with it.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from verl_omni_core.errors import ContractError, VerlOmniError
from verl_omni_core.rollout import _weights
from verl_omni_core.rollout.vllm_omni import standing
from verl_omni_core.rollout.vllm_omni.lora_request import OmniTensorLoRARequest
from verl_omni_core.weights.checksum import checksum

logger = logging.getLogger(__name__)

_NETWORK = "transformer"


class RolloutWorkerExtension(CustomPipelineWorkerExtension):
    """Mixed into the engine's worker class. Answers are plain mappings; a refusal is an answer with ``error``, because
    not every executor brings an exception back."""

    def configure_rollout(self, threads: int) -> dict[str, Any]:
        """Set the CPU threads of the thread and process that compute."""
        torch.set_num_threads(threads)
        return {"threads": torch.get_num_threads()}

    def describe_rollout(self) -> dict[str, Any]:
        """Return the pipeline's class and its own counts."""
        pipeline = self.model_runner.pipeline
        return {
            "pipeline_class": type(pipeline).__name__,
            "requests": pipeline.requests,
            "batches": dict(pipeline.batches),
            "forward_s": pipeline.seconds,
            "threads": torch.get_num_threads(),
        }

    def load_lora_tensors(self, request: OmniTensorLoRARequest) -> dict[str, Any]:
        """Register and activate an adapter from memory; the answer has ``bound`` modules and ``checksum``."""
        return _answer(self._load_lora_tensors, request)

    def load_full_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Overwrite the network's parameters; the answer has ``bound`` parameters and ``checksum``."""
        return _answer(self._load_full_tensors, tensors)

    def checksum_of_network(self) -> dict[str, Any]:
        """Return the checksum of this rank's parameters as they stand, adapters included."""
        network = getattr(self.model_runner.pipeline, _NETWORK)
        digest = hashlib.sha256(checksum(dict(network.named_parameters())).encode())
        for name, layer in sorted(self.lora_manager._lora_modules.items()):
            stacked = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
            for index, (lora_a, lora_b) in enumerate(stacked):
                digest.update(f"{name}.{index}".encode() + checksum({"A": lora_a, "B": lora_b}).encode())
        return {"checksum": digest.hexdigest()}

    def _load_lora_tensors(self, request: OmniTensorLoRARequest) -> dict[str, Any]:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = self.lora_manager
        tensors = request.lora_tensors or {}
        modules = _weights.lora_modules(tensors)
        network = getattr(self.model_runner.pipeline, _NETWORK)
        bindable = standing.bindable_modules(network, manager._packed_modules_mapping)
        bound = _weights.check_bound(modules, bindable, "LoRA modules")
        targets = [f"{_NETWORK}.{module}" for module in modules]
        helper = PEFTHelper.from_dict(_weights.peft_fields(request.peft_config, targets))
        adapter = LoRAModel.from_lora_tensors(
            lora_model_id=request.lora_int_id,
            # copies: optimize() scales lora_B in place, and within one process these are the caller's own tensors
            tensors={
                f"{_NETWORK}.{module}.lora_{side}.weight": tensor.detach().clone()
                for module, pair in modules.items()
                for side, tensor in pair.items()
            },
            peft_helper=helper,
            device="cpu",
            dtype=manager.dtype,
            model_vocab_size=None,
            weights_mapper=None,
        )
        for layer in adapter.loras.values():
            layer.optimize()
        manager._evict_for_new_adapter()
        manager._touch_adapter_info(request.lora_int_id)
        manager._registered_adapters[request.lora_int_id] = adapter
        manager._replace_layers_with_lora(helper)
        manager.set_active_adapter(request.reference(), 1.0)
        for name, weights in adapter.loras.items():
            standing.check_adapter(manager, name, weights.lora_a, weights.lora_b)
        return {"bound": bound, "checksum": checksum(tensors)}

    def _load_full_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        if self.lora_manager is not None and self.lora_manager._lora_modules:
            raise ContractError("the engine holds an adapter and cannot take full weights; start a new engine")
        network = getattr(self.model_runner.pipeline, _NETWORK)
        plan = standing.fused_parts(network, tensors)
        _weights.check_bound(plan, standing.tensors_of(network), "parameters")
        _weights.check_bound([name for name, _ in network.named_parameters()], plan, "of the engine's parameters")
        with torch.no_grad():
            network.load_weights((name, tensor.detach().clone()) for name, tensor in tensors.items())
        now = standing.tensors_of(network)
        for name, parts in plan.items():
            standing.check_parameter(name, now[name], [tensors[part] for part in parts])
        return {"bound": len(tensors), "checksum": checksum(tensors)}


def _answer(load: Callable[[Any], dict[str, Any]], what: Any) -> dict[str, Any]:
    try:
        return load(what)
    except VerlOmniError as error:
        return {"error": str(error), "error_class": type(error).__name__}
    except Exception as error:
        logger.exception("loading weights failed")
        return {"error": repr(error), "error_class": "EngineError"}
