"""Faults that a run is to meet: where, once, and what happens there. Every process of a run reads them from one file.

Standard library only: it is imported as the interpreters of actors start. A fault strikes once; who comes to its point
first claims it by creating a marker, which also says when that was.
"""

import json
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "FAULTS_PLAN"
"""Names the file."""
POLL_S = 0.02
LONGEST_PAUSE_S = 240.0


@dataclass(frozen=True)
class Fault:
    """One fault."""

    point: str
    """Where a process asks whether a fault is due, such as ``commit.done``."""
    action: str = "kill"
    """``kill``: SIGKILL, to the process itself. ``pause``: wait until :func:`resume`. Others are the point's to do."""
    where: dict[str, Any] = field(default_factory=dict)
    """Facts of the point that must hold; a list allows each of its values."""


def write(path: Path, faults: Iterable[Fault]) -> None:
    """Make ``faults`` the plan, of which none has struck."""
    for marker in path.parent.glob(f"{path.name}.*"):
        marker.unlink()
    staged = path.with_suffix(".staged")
    staged.write_text(json.dumps([asdict(fault) for fault in faults]))
    staged.replace(path)


def struck(path: Path, number: int = 0) -> float | None:
    """Return when fault ``number`` of the plan struck, as Unix time; none if it has not."""
    try:
        return json.loads(_marker(path, number).read_text())["time"]
    except (FileNotFoundError, json.JSONDecodeError):  # not there, or this moment being written
        return None


def resume(path: Path, number: int = 0) -> None:
    """Let a process that paused go on."""
    path.with_name(f"{path.name}.{number}.resumed").touch()


def is_planned(point: str) -> bool:
    """Say whether some fault of the plan may still strike at ``point``."""
    return any(fault.point == point and struck(path, number) is None for path, number, fault in _plan())


def due(point: str, **facts: Any) -> str | None:
    """Claim the fault that is planned here, if there is one, and return its action.

    A kill has happened by then, and a pause has ended.
    """
    found = claim(point, **facts)
    if found is None:
        return None
    path, number, action = found
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "pause":
        _wait(path, number)
    return action


def claim(point: str, **facts: Any) -> tuple[Path, int, str] | None:
    """Claim the fault that is planned here without acting; returns plan, number and action."""
    for path, number, fault in _plan():
        if fault.point == point and all(_holds(facts.get(name), wanted) for name, wanted in fault.where.items()):
            try:
                with _marker(path, number).open("x") as marker:
                    marker.write(json.dumps({"time": time.time(), "pid": os.getpid(), **facts}))
                    marker.flush()
            except FileExistsError:
                continue
            return path, number, fault.action
    return None


def _plan() -> list[tuple[Path, int, Fault]]:
    path = Path(os.environ.get(VARIABLE, ""))
    if not path.is_file():
        return []
    return [(path, number, Fault(**value)) for number, value in enumerate(json.loads(path.read_text()))]


def _holds(seen: Any, wanted: Any) -> bool:
    return seen in wanted if isinstance(wanted, list) else seen == wanted


def _marker(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}.struck")


def _wait(path: Path, number: int) -> None:
    deadline = time.monotonic() + LONGEST_PAUSE_S
    while not path.with_name(f"{path.name}.{number}.resumed").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody resumed fault {number} of {path} within {LONGEST_PAUSE_S:.0f} s")
        time.sleep(POLL_S)
