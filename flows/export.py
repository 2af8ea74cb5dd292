"""Export: trained weights for diffusers and peft."""

from typing import Any, Literal

from prefect import flow

from tasks.export import export_weights


@flow(name="export", flow_run_name="{run_id}", log_prints=False)
def export(
    run_id: str,
    out: str,
    step: int | None = None,
    network: Literal["policy", "average"] | None = None,
    format: Literal["peft", "diffusers"] | None = None,
    store: str = "runs",
) -> dict[str, Any]:
    """Write trained weights of a run into a new folder, loaded again by stock libraries before it appears.

    Args:
        run_id: Name of the run; it need not be alive.
        out: Folder to make.
        step: Whose weights; none: the newest that has them.
        network: The policy or its moving average; none: the average where the run keeps one.
        format: An adapter for peft and diffusers, or a whole diffusers pipeline; none: the adapter, or the pipeline
            where all parameters were trained.
        store: Folder that holds the runs.

    Returns:
        What was written, as it stands in the folder's ``export.json``.
    """
    return export_weights(run_id, out, step, network, format, store)
