"""``verl-omni gc``: delete what a run does not need any more."""

from typing import TYPE_CHECKING, Annotated

import typer

from verl_omni_core.cli._arguments import Overrides, Store

if TYPE_CHECKING:
    from verl_omni_core.stages.gc import Collection


def gc(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    store: Store = "runs",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    set_: Overrides = None,
) -> None:
    """Delete what the settings of durability.retention let go of a run, and attempts that nothing came of.

    A run does this itself while it goes on; this is for runs that stand still, and for other settings than the run's:
    --set changes them for this time. What replay needs after the newest snapshot that reads back stays.
    """
    from verl_omni_core.stages.gc import gc as collect

    print(text_of(run_id, collect(run_id, store, overrides=set_ or (), dry_run=dry_run), dry_run))


def text_of(run_id: str, collection: "Collection", dry_run: bool) -> str:
    """Return what went, or would go, for people."""
    snapshot = collection.verified_step
    lines = [
        f"{run_id}: {collection.done} steps finished, newest snapshot that reads back: "
        + (f"step {snapshot}" if snapshot else "none, so all trajectories stay")
    ]
    for line in collection.lines:
        steps = f"step {line.first}" if line.first == line.last else f"steps {line.first}-{line.last}"
        unit = "attempts" if line.what == "attempts" else "files"
        lines.append(f"  {line.what:<32} {steps:<16} {line.files:>7} {unit:<8} {size(line.bytes):>9}  {line.why}")
    verb = "would go" if dry_run else "deleted"
    return "\n".join([*lines, f"{verb}: {size(collection.bytes)} ({collection.bytes} bytes)"])


def size(count: int) -> str:
    """Return bytes for people: ``1.5 GB``."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
