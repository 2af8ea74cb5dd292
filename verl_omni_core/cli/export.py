"""``verl-omni export``: trained weights for other programs."""

from typing import Annotated, Literal

import typer

from verl_omni_core.cli._arguments import Network, Step, Store
from verl_omni_core.cli._refusals import before_anything_starts


def export(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    out: Annotated[str, typer.Option(help="Folder to make.")],
    step: Step = None,
    network: Network = None,
    format_: Annotated[
        Literal["peft", "diffusers"] | None,
        typer.Option(
            "--format",
            help="An adapter for peft and diffusers, or a whole diffusers pipeline; none: the adapter, or the pipeline "
            "where all parameters were trained.",
        ),
    ] = None,
    store: Store = "runs",
) -> None:
    """Export trained weights of a run for diffusers and peft. The run need not be alive.

    The folder appears after stock libraries have loaded it and computed what was trained.
    """
    from transformers.utils import logging

    from verl_omni_core.stages.export import export as export_weights
    from verl_omni_core.store.runs import open_run

    with before_anything_starts():
        open_run(store, run_id)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    done = export_weights(run_id, out, store=store, step=step, network=network, format=format_)
    what = "LoRA adapter" if done.format == "peft" else "pipeline"
    print(f"{what} of {done.run_id}, {done.network} after step {done.step}: {done.folder}")
    print(f"loaded again by stock libraries: {done.tensors} tensors, velocity equal to {done.largest_difference:.1e}")
    if done.format == "peft":
        print(f'use it: pipeline.load_lora_weights("{done.folder}")')
    else:
        print(f'use it: DiffusionPipeline.from_pretrained("{done.folder}")')
