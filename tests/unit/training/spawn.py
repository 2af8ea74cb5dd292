"""Runs a program on real processes that form a group of ranks, with a hard deadline."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

DEADLINE_S = 240


def run_ranks(program: str, size: int, place: Path, **arguments: Any) -> list[Any]:
    """Run ``programs.<program>(ranks, **arguments)`` on ``size`` processes and return what each returned.

    Raises:
        AssertionError: a process failed (with its output) or ran past the deadline.
    """
    place.mkdir(parents=True, exist_ok=True)
    torch.save(arguments, place / "arguments.pt")
    command = [sys.executable, "-m", "tests.unit.training.programs", program, str(size), str(place)]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(size)
    ]
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=DEADLINE_S)[0].decode())
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    failed = [output for process, output in zip(processes, outputs, strict=True) if process.returncode]
    assert not failed, failed[0][-4000:]
    return [torch.load(place / f"result-{rank}.pt", weights_only=False) for rank in range(size)]
