"""The vLLM-Omni engine; the only importer of vllm and vllm_omni, and not when this package is imported."""

from verl_omni_core.rollout._contract import EngineOptions, RolloutEngine
from verl_omni_core.rollout.vllm_omni import compat

KNOWN_TO_WORK = compat.KNOWN_TO_WORK


def check(options: EngineOptions) -> None:
    """Refuse what :func:`build` would refuse, in milliseconds and before anything starts.

    Raises:
        ConfigError: see :func:`build`.
    """
    from verl_omni_core.rollout.vllm_omni.engine import check_options

    compat.installed_version()
    check_options(options)


async def build(options: EngineOptions) -> RolloutEngine:
    """Start vLLM-Omni in this process and return the engine.

    Raises:
        ConfigError: the package is missing or of a version that is not admitted, or options that it does not take.
        EngineError: it did not start. DeadlineError: not within ``start_timeout_s``.
    """
    from verl_omni_core.rollout.vllm_omni.engine import start

    return await start(options)


def installed_version() -> str:
    """Return the version of the engine's package.

    Raises:
        ConfigError: it is not installed, or of a version that is not admitted.
    """
    return compat.installed_version()
