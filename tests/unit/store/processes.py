"""Real processes that use a store, for tests that kill them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
LIMIT_S = 30

PRELUDE = """
import sys, time, json
import numpy as np, pyarrow as pa
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.lease import take_ownership
from verl_omni_core.store.ledger import Ledger
def table(start, rows=8):
    return pa.table({"sample_index": np.arange(start, start + rows), "x": np.arange(start, start + rows) * 0.5})
def say(*words):
    print(*words, flush=True)
root = sys.argv[1]
"""


def start(program: str, root: Path, *arguments: str) -> subprocess.Popen:
    """Run a program in a process of its own; its lines arrive through ``stdout``."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + program, str(root), *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip


def kill_after(process: subprocess.Popen, line: str) -> None:
    """Wait until the process says ``line``, then kill it as a crash would."""
    while (said := process.stdout.readline().strip()) != line:
        assert said or process.poll() is None, f"the process ended before it said {line!r}"
    process.send_signal(signal.SIGKILL)
    process.wait(LIMIT_S)


def answers(process: subprocess.Popen, text: str = "") -> list[str]:
    """Let the process finish and return what it said."""
    out, _ = process.communicate(text, timeout=LIMIT_S)
    assert process.returncode == 0, out
    return out.splitlines()
