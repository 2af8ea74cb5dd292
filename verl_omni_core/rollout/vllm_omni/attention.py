"""Scaled dot-product attention for a platform outside vLLM-Omni's tree.

The engine's own dispatch knows its five platforms by name and raises for any other, so ``forward`` goes to the
implementation that those with torch's kernel share.
"""

from typing import Any

from torch import Tensor
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class HostAttention(SDPAImpl):
    """torch's attention, with key masks broadcast over queries."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Tensor:
        """Return [B, L, heads, width] attention of inputs of that shape."""
        return self._forward_impl(query, key, value, attn_metadata, mask_mode="broadcast_k")


class HostAttentionBackend(SDPABackend):
    """Names :class:`HostAttention` to the engine."""

    @staticmethod
    def get_impl_cls() -> type[HostAttention]:
        return HostAttention
