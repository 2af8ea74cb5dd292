"""What durability costs: one JSON line a part, each with its bound and whether it holds.

    python -m benchmarks.overhead                          # all parts, half an hour on two cores
    python -m benchmarks.overhead --parts commit open      # some of them
    python -m benchmarks.overhead --small                  # a check of the script; its numbers mean nothing

commit   the trajectories and embeddings of 512 images, written and committed (benchmarks/arrow_commit.py)
open     a run of 10,000 steps: where it stands, what it goes on with, its last 20 steps (benchmarks/long_run.py)
memory   the driver over a thousand steps without engine and trainer, as Prefect tasks (benchmarks/noop_steps.py)
step     a step against an in-memory loop, and one whose stages are committed (benchmarks/step_overhead.py)

Run it on an idle machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from verl_omni_core.store import index, index_files, runs
from verl_omni_core.store.artifacts import RunStore

NOOP_STEP_S, STEP_RATIO = 0.3, 1.05
COMMIT_S = 1.0
MEMORY_BYTES = 50_000_000
OPEN_S = 2.0
LAST_STEPS = 20
_STEP_TIMEOUT_S = 3600
_PART_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Opened:
    """What opening a run reads of it."""

    finished: int
    """Steps behind."""
    swept: int
    ledger_records: int
    """Of the last steps."""
    last_steps: int
    artifacts: int
    """Of the last steps, their manifests read."""


def open_long_run(root: Path) -> Opened:
    """Open a run as its next owner does, without actors: head, resume plan, last steps."""
    from verl_omni_core.store.lease import take_ownership

    folder = runs.open_run(root.parent, root.name)
    with take_ownership(folder.root, "benchmark") as own:
        store = RunStore(root, epoch=own.epoch)
        index.repair(store, index.open_ledger(store))
        swept = index.sweep(store)
        done = runs.steps_done(root)
        finished = index.finished_steps(store)
        last = range(max(done - LAST_STEPS, 0) + 1, done + 1)
        records = index.open_ledger(store).records_since(last[0])
        refs = [ref for step in last for stage in store.stages(step) if (ref := store.find(step, stage)) is not None]
        for ref in refs:
            store.manifest(ref)
        return Opened(finished, swept, len(records), len(last), len(refs))


def step_lines(small: bool, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the line of :mod:`benchmarks.step_overhead`, and what it says of the two bounds."""
    command = [sys.executable, "-m", "benchmarks.step_overhead", "--folder", str(folder)]
    measured = _line_of([*command, *(("--small", "--pairs", "1") if small else ())], _STEP_TIMEOUT_S)
    yield measured
    yield _bounded("noop_step", measured["noop_step_s"], NOOP_STEP_S, "s")
    yield _bounded("step_ratio", measured["ratio_of_medians"], STEP_RATIO, "1", pairs=measured["pairs"])


def commit_lines(small: bool, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the seconds of committing a step's trajectories and embeddings."""
    command = [sys.executable, "-m", "benchmarks.arrow_commit", "--folder", str(folder)]
    measured = _line_of([*command, "--repeats", "1" if small else "5"], _PART_TIMEOUT_S)
    yield measured
    yield _bounded("commit", measured["commit_s"], COMMIT_S, "s", bytes=measured["bytes"])


def memory_lines(small: bool, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield how much the driver grew over many steps."""
    steps = 30 if small else 1000
    command = [sys.executable, "-m", "benchmarks.noop_steps", "--steps", str(steps), "--folder", str(folder)]
    measured = _line_of(command, _PART_TIMEOUT_S)
    yield measured
    yield _bounded("driver_memory", measured["spread_bytes"], MEMORY_BYTES, "bytes", steps=steps)


def open_lines(small: bool, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the seconds of opening a long run in new processes, with its index and, once, without."""
    from benchmarks.long_run import make_long_run

    steps = 200 if small else 10_000
    begun = time.perf_counter()
    root = make_long_run(folder, steps)
    made_s = round(time.perf_counter() - begun, 1)
    command = [sys.executable, "-m", "benchmarks.overhead", "--open", str(root)]
    seconds = [_line_of(command, _PART_TIMEOUT_S)["open_s"] for _ in range(1 if small else 5)]
    for path in (root / index_files.FOLDER).iterdir():
        path.unlink()
    without = _line_of(command, _PART_TIMEOUT_S)["open_s"]
    yield _bounded(
        "open", median(seconds), OPEN_S, "s", steps=steps, all=seconds, without_index_s=without, made_s=made_s
    )


PARTS: dict[str, Callable[[bool, Path], Iterator[dict[str, Any]]]] = {
    "commit": commit_lines,
    "open": open_lines,
    "memory": memory_lines,
    "step": step_lines,
}


def _bounded(part: str, value: float, bound: float, unit: str, **facts: Any) -> dict[str, Any]:
    shown = {"value": value, "bound": bound, "unit": unit, "holds": value <= bound}
    return {"benchmark": "overhead", "part": part, **shown, **facts, "load_average": round(os.getloadavg()[0], 2)}


def _line_of(command: list[str], timeout_s: float) -> dict[str, Any]:
    """Run a measurement as a program of its own and return the line that it prints."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=timeout_s, check=True)
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


def _timed_open(root: Path) -> dict[str, Any]:
    begun = time.perf_counter()
    opened = open_long_run(root)
    return {"open_s": round(time.perf_counter() - begun, 3), **vars(opened)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--small", action="store_true", help="A check of the script in a minute or two.")
    parser.add_argument("--folder", type=Path, help="Where to write; the system's temporary folder by default.")
    parser.add_argument("--open", type=Path, metavar="RUN", help="Only open the run in this folder.")
    arguments = parser.parse_args()
    if arguments.open:
        print(json.dumps(_timed_open(arguments.open)))
        return
    for part in arguments.parts:
        with tempfile.TemporaryDirectory(prefix="overhead-", dir=arguments.folder) as name:
            for line in PARTS[part](arguments.small, Path(name)):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
