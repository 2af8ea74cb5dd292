"""Weights that do not fit on the disk are refused with what to do."""

import os
import subprocess
import sys

import pytest
import torch

from tests.unit.store.processes import LIMIT_S, REPOSITORY
from verl_omni_core.errors import StoreError
from verl_omni_core.rollout._contract import WeightUpdate
from verl_omni_core.weights.filesystem import write_update

FILL = """
mount -t tmpfs -o size=1m tmpfs "$1" || exit 77
exec "$2" -c '
import sys, torch
from verl_omni_core.errors import StoreError
from verl_omni_core.rollout._contract import WeightUpdate
from verl_omni_core.weights import filesystem
filesystem.check_free = lambda *args: None  # as when another process takes the space after the check
try:
    filesystem.write_update(sys.argv[1], WeightUpdate(1, "lora", {"a": torch.zeros(1 << 20)}, {}))
except StoreError as error:
    print("refused:", error)
' "$1"
"""


def test_weights_larger_than_the_free_space_are_refused_before_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_omni_core.store.durable_files.free_bytes", lambda _: 1000)
    with pytest.raises(StoreError, match=r"are needed"):
        write_update(tmp_path, WeightUpdate(1, "lora", {"a": torch.zeros(1000)}, {}))
    assert list(tmp_path.iterdir()) == []


def test_weights_that_fill_the_disk_are_told_as_the_store_tells_it(tmp_path):
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", FILL, "sh", str(tmp_path), sys.executable], capture_output=True, text=True,
        timeout=4 * LIMIT_S, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=False,
    )  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this host lets nobody mount a small file system")
    assert done.stdout.startswith("refused: cannot write"), done.stdout + done.stderr
    assert "No space left" in done.stdout and "start again" in done.stdout
