"""A diffusion worker for hosts without CUDA: sleeps without its allocator, and meets other ranks on loopback."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker

from verl_omni_core.training import ranks

_LOOPBACK = "127.0.0.1"
_WAIT_S = 1800.0  # as the engine's own group has it


class HostDiffusionWorker(DiffusionWorker):
    """Level 1 sets the parameters aside; there is no second level, because nothing could bring them back."""

    _aside: dict[str, Tensor] | None = None

    def init_device(self) -> None:
        """Make the process group, which the engine then finds; its own would listen on every address of the host."""
        if not torch.distributed.is_initialized():
            port, store = int(self.od_config.master_port), None
            if self.rank == 0:
                store, port = ranks.open_rendezvous(_LOOPBACK, _WAIT_S, port)
            size = self.od_config.num_gpus
            ranks.join(self.rank, size, host=_LOOPBACK, port=port, device="cpu", timeout_s=_WAIT_S, store=store)
        super().init_device()

    def sleep(self, level: int = 1) -> int:
        """Empty the network's parameters and return how many bytes they held."""
        if level != 1:
            raise NotImplementedError(f"sleep level {level} drops the weights for good; use level 1")
        if self._aside is not None:
            return 0
        self._aside = {}
        for name, parameter in self.model_runner.pipeline.named_parameters():
            self._aside[name] = parameter.data
            parameter.data = torch.empty(0, dtype=parameter.dtype)
        return sum(tensor.nbytes for tensor in self._aside.values())

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Put the parameters back."""
        if self._aside is not None:
            for name, parameter in self.model_runner.pipeline.named_parameters():
                parameter.data = self._aside[name]
            self._aside = None
        return True

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager:
        return nullcontext()
