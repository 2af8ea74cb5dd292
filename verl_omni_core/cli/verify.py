"""``verl-omni verify``: check a run's folder against everything that was written down about it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verl_omni_core.cli._arguments import Store

if TYPE_CHECKING:
    from verl_omni_core.store.verification import Verification


def verify(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")],
    store: Store = "runs",
    rebuild_index: Annotated[
        bool, typer.Option("--rebuild-index", help="First write the index anew; nobody may own the run.")
    ] = False,
) -> None:
    """Check commits, manifests, files, lineage, ledger, checkpoints, settings and index of a run.

    It reads everything and changes nothing. Files that retention deleted count as deleted. The exit code is 0 if the
    run is intact, and 1 with a line for every problem if it is not.
    """
    from verl_omni_core.store.verification import verify_run

    root = _folder(store, run_id)
    if rebuild_index:
        _rebuild(root)
    found = verify_run(root, _show if sys.stderr.isatty() else None)
    print(text_of(run_id, found))
    if found.problems:
        raise typer.Exit(1)


def text_of(run_id: str, found: "Verification") -> str:
    """Return what a check found, for people: a line for every problem, and one for all of it."""
    from verl_omni_core.cli.gc import size

    counts = (
        f"{found.steps} steps, {found.commits} commits, {found.files} files of {size(found.bytes)}, "
        f"{found.collected} files deleted by retention, {found.records} ledger records"
    )
    verdict = f"{len(found.problems)} problems" if found.problems else "intact"
    lines = [*(f"note: {note}" for note in found.notes), *(f"problem: {problem}" for problem in found.problems)]
    return "\n".join([*lines, f"{run_id}: {verdict} ({counts})"])


def _folder(store: str, run_id: str) -> Path:
    from verl_omni_core.errors import StoreError
    from verl_omni_core.store.places import folder_of
    from verl_omni_core.store.runs import open_run

    try:
        return open_run(store, run_id).root
    except StoreError:
        root = folder_of(store).absolute() / run_id
        if not (root / "steps").is_dir():
            raise
        return root  # damaged settings are one problem of several


def _rebuild(root: Path) -> None:
    from verl_omni_core.stages.opening import this_process
    from verl_omni_core.store import index
    from verl_omni_core.store.artifacts import RunStore
    from verl_omni_core.store.lease import take_ownership
    from verl_omni_core.store.ledger import Ledger

    with take_ownership(root, this_process()) as own:
        written = index.rebuild(RunStore(root, epoch=own.epoch), Ledger(root, epoch=own.epoch))
    print(f"index: {len(written)} blocks written anew")


def _show(files: int, all_files: int, checked: int, all_bytes: int) -> None:
    from verl_omni_core.cli.gc import size

    end = "\n" if files == all_files else ""
    print(
        f"\rchecked {files} of {all_files} files, {size(checked)} of {size(all_bytes)}   ",
        end=end,
        file=sys.stderr,
        flush=files % 100 == 0 or bool(end),
    )
