"""Where the blocks of the index lie, and forgetting those that a step which is taken back makes untrue."""

from pathlib import Path

from verl_omni_core.store.durable_files import sync_all

FOLDER = "index"
STEPS = 100
"""Steps of a block."""


def block_path(root: Path, last: int) -> Path:
    """Return where the block that ends with step ``last`` lies, or would lie."""
    return root / FOLDER / f"{last:06d}.json"


def block_steps(root: Path) -> list[int]:
    """Return the last step of every block that has a file, in order."""
    folder = root / FOLDER
    names = [path.stem for path in folder.iterdir() if path.suffix == ".json"] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())


def forget(root: Path, step: int) -> None:
    """Delete the blocks that say that ``step`` is finished; whoever takes back a commit does so before that."""
    stale = [block_path(root, last) for last in block_steps(root) if last >= step]
    for path in stale:
        path.unlink(missing_ok=True)
    if stale:
        sync_all([root / FOLDER])
