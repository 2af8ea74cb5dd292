"""Draw the fixed prompts of the image grid with the network that validation judges."""

import pyarrow as pa

from verl_omni_core.batches import columns
from verl_omni_core.batches.tables import read_tensor
from verl_omni_core.report.images import image_grid
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.session import RunRef, Session, session_of
from verl_omni_core.stages.validate import draw_judged, held_out
from verl_omni_core.store.manifest import ArtifactRef

STAGE = "preview"
TAG = "images/held_out"
"""Name of the grid in trackers."""


@stage(STAGE)
def preview(run: RunRef, step: int) -> ArtifactRef:
    """Commit one sample of each grid prompt and write the grid to the run's ``images`` folder.

    Prompts and seeds are those of validation, so pictures of different steps compare.
    """
    session = session_of(run)
    prompts, requests = held_out(session, session.config.tracking.grid_prompts, version=step)
    first = requests.filter(pa.compute.equal(requests.column(columns.SESSION), 0))
    samples = draw_judged(session, STAGE, step, prompts, _renumbered(first))
    write_grid(session, step, samples)
    return samples


def write_grid(session: Session, step: int, samples: ArtifactRef) -> str:
    """Write the image grid of committed samples into the run's folder and to its tracker; return the path."""
    media = session.store.table(samples, "media")
    prompts = session.store.table(samples, "prompts").column(columns.PROMPT).to_pylist()
    path = session.root / "images" / f"step-{step:06d}.png"
    path.parent.mkdir(exist_ok=True)
    grid = image_grid(read_tensor(media, columns.PIXELS).numpy(), prompts)
    path.write_bytes(grid)
    session.tracker.image(step, TAG, grid)
    return str(path)


def _renumbered(requests: pa.Table) -> pa.Table:
    index = requests.schema.get_field_index(columns.SAMPLE_INDEX)
    field = requests.schema.field(index)
    return requests.set_column(index, field, pa.array(range(len(requests)), pa.int64()))
