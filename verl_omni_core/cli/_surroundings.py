"""What commands that use the engine have in common: Ray and Prefect around them, and flows by name."""

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_omni_core.settings.run import ClusterSettings


def surround(settings: "ClusterSettings", *, with_prefect: bool, say: Callable[[str], None]) -> None:
    """Find or start what a run needs around it, and tell the user where it is."""
    from verl_omni_core.cluster.start import start

    surroundings = start(settings, with_prefect=with_prefect, say=say)
    if surroundings.prefect_url:
        say(f"Prefect UI: {surroundings.prefect_url.removesuffix('/api')}")
    if surroundings.started:
        names = " and ".join(surroundings.started)
        say(f"{names}: up for the next run as well; stop with: verl-omni down")
    # one line a task would tear a live display; the flow's own page has the log
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "WARNING")


def flow(name: str) -> Callable[..., Any]:
    """Return a flow. By name, because the core never imports what stands above it."""
    found: Callable[..., Any] = getattr(importlib.import_module(f"flows.{name}"), name)
    return found
