"""RL post-training for diffusion, unified and omni-modality generators.

Importing this package imports neither torch, nor ray, nor prefect: heavy modules are imported by the code that
needs them.
"""

from typing import Any

from verl_omni_core.version import __version__

__all__ = ["__version__", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":
        from verl_omni_core.online import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
