"""Entry points: what vLLM and vLLM-Omni call, in every process of an engine, to find our platform and pipelines.

Importing this module imports neither of them.
"""

_PACKAGE = "verl_omni_core.rollout.vllm_omni"


def omni_platform() -> str | None:
    """Return the class path of vLLM-Omni's platform for hosts without CUDA, or none where CUDA is present.

    Platforms outside vLLM-Omni's tree win over those inside, so ours steps back by itself.
    """
    return None if _has_cuda() else f"{_PACKAGE}.platform.HostOmniPlatform"


def vllm_platform() -> str | None:
    """Return the class path of vLLM's platform for hosts without CUDA, or none where CUDA is present."""
    return None if _has_cuda() else f"{_PACKAGE}.vllm_platform.HostPlatform"


def register_pipelines() -> None:
    """Register our pipelines for their architectures and apply the fixes that the installed version needs."""
    from vllm_omni.diffusion.registry import register_diffusion_model

    from verl_omni_core.rollout.vllm_omni import compat

    for architecture, class_name in PIPELINES.items():
        register_diffusion_model(
            architecture, f"{_PACKAGE}.pipeline", class_name, post_process_func_name="post_process_function"
        )
    if not _has_cuda():
        compat.apply_fixes()


PIPELINES = {"StableDiffusion3Pipeline": "SD3TrajectoryPipeline"}
"""Architecture, as the checkpoint's ``model_index.json`` names it, to the class of ``pipeline.py`` that serves it."""


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
