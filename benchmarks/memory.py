"""Memory of a command, its children and the standing local services: one JSON line with the peak.

    python benchmarks/memory.py -- verl-omni train glyph-flow_grpo-ocr-cpu

A process counts with its proportional set size, which shares every page among those that map it. Shared memory files
that one of them holds open are added whole, so mapped parts of them count twice: the sum is an upper bound.
"""

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import psutil

from verl_omni_core.cluster import prefect_server, ray_head, services

_BLOCK = 512
_SHM = "/dev/shm/"


@dataclass(frozen=True)
class Footprint:
    """Memory of some processes at one moment."""

    pss_bytes: int
    shared_bytes: int
    processes: int

    @property
    def total_bytes(self) -> int:
        return self.pss_bytes + self.shared_bytes


class Sampler:
    """Watches process trees in the background; :attr:`peak` is the largest footprint seen."""

    def __init__(self, roots: Callable[[], Iterable[int]], interval_s: float = 1.0) -> None:
        """Make a sampler.

        Args:
            roots: returns the process ids whose trees count; asked every time, as services come and go.
        """
        self._roots, self._interval_s = roots, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak = Footprint(0, 0, 0)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=30)

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, footprint(self._roots()), key=lambda seen: seen.total_bytes)
            self._stop.wait(self._interval_s)


def footprint(roots: Iterable[int]) -> Footprint:
    """Return the memory of the trees under ``roots`` now. Processes that end meanwhile do not count."""
    pids = tree(roots)
    shared: dict[tuple[int, int], int] = {}
    for pid in pids:
        shared |= _shared_files(pid)
    return Footprint(sum(_pss(pid) for pid in pids), sum(shared.values()), len(pids))


def tree(roots: Iterable[int]) -> set[int]:
    """Return the ids of ``roots`` and of all their descendants."""
    found: set[int] = set()
    for root in roots:
        try:
            process = psutil.Process(root)
            found |= {root, *(child.pid for child in process.children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
    return found


def services_here() -> list[int]:
    """Return the process ids of the local Ray head and Prefect server, as far as they run."""
    running = [services.find(name) for name in (ray_head.NAME, prefect_server.NAME)]
    return [service.pid for service in running if service is not None]


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0  # it ended, or is a zombie
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _shared_files(pid: int) -> dict[tuple[int, int], int]:
    """Return the allocated bytes of open shared memory files, by device and inode: each counts once."""
    found = {}
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if str(entry.readlink()).startswith(_SHM):
                status = entry.stat()
                found[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK
    except OSError:
        return found  # the process or one of its files is gone
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=3600, help="Deadline of the command, seconds.")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    process = subprocess.Popen(given.command, stdout=sys.stderr)
    with Sampler(lambda: [process.pid, *services_here()]) as sampler:
        try:
            code = process.wait(given.timeout)
        finally:
            process.kill()
    print(json.dumps({"benchmark": "memory", "total_bytes": sampler.peak.total_bytes, **asdict(sampler.peak)}))
    sys.exit(code)


if __name__ == "__main__":
    main()
