"""vLLM's side of a host without CUDA."""

from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum


class HostPlatform(CpuPlatform):
    """A CPU whose linear layers keep their parameters.

    vLLM's own CPU platform packs every linear weight into a vendor blob after loading and frees the parameter, so a
    weight update would have nothing to write to. It does so only where ``is_cpu()``; a platform from outside is not.
    """

    _enum = PlatformEnum.OOT

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Change nothing: vLLM's CPU settings are about its language-model worker."""
