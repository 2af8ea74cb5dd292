"""vLLM-Omni's side of a host without CUDA.

The host is shown as several devices, so that tensor parallelism on one machine runs as gloo ranks.
"""

import os

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

_PACKAGE = "verl_omni_core.rollout.vllm_omni"
_DEVICES = 8


class HostOmniPlatform(OmniPlatform, CpuPlatform):
    """Devices, memory and classes of the diffusion engine on a CPU.

    Every name that vLLM would look up on ``torch.cpu`` and not find there is defined here.
    """

    _omni_enum = OmniPlatformEnum.OOT
    device_name = "cpu"
    dist_backend = "gloo"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return _DEVICES

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        return None

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        return None

    @classmethod
    def current_device(cls) -> int:
        return 0

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def is_initialized(cls) -> bool:
        return True

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return psutil.virtual_memory().available

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @classmethod
    def memory_reserved(cls, device: torch.device | None = None) -> int:
        return psutil.Process(os.getpid()).memory_info().rss

    @classmethod
    def max_memory_reserved(cls, device: torch.device | None = None) -> int:
        return cls.memory_reserved(device)

    @classmethod
    def max_memory_allocated(cls, device: torch.device | None = None) -> int:
        return cls.memory_reserved(device)

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | None = None) -> None:
        return None

    @classmethod
    def empty_cache(cls) -> None:
        return None

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return "vllm_omni.worker.gpu_ar_worker.GPUARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return "vllm_omni.worker.gpu_generation_worker.GPUGenerationWorker"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None = None, head_size: int = 0, allow_trtllm_default: bool = False
    ) -> str:
        if selected_backend is not None and selected_backend.upper() != "TORCH_SDPA":
            raise ValueError(
                f"attention backend {selected_backend!r} does not run on a CPU; use 'TORCH_SDPA' or name none"
            )
        return f"{_PACKAGE}.attention.HostAttentionBackend"

    @classmethod
    def get_diffusion_worker_cls(cls) -> str:
        return f"{_PACKAGE}.worker.HostDiffusionWorker"
