"""Trained weights out of a run's store, for other programs."""

from dataclasses import asdict
from typing import Any, Literal

from prefect import task

from tasks.settings import STAGE
from verl_omni_core.stages import export


@task(name="export", task_run_name="{run_id}/export", **STAGE)
def export_weights(
    run_id: str,
    out: str,
    step: int | None,
    network: Literal["policy", "average"] | None,
    format: Literal["peft", "diffusers"] | None,
    store: str,
) -> dict[str, Any]:
    """Write and verify an adapter or a pipeline."""
    return asdict(export.export(run_id, out, store=store, step=step, network=network, format=format))
