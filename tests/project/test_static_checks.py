"""`make check` passes: lint, format, types."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(tool: str, *arguments: str, timeout_s: float) -> None:
    beside = Path(sys.executable).with_name(tool)
    command = str(beside) if beside.exists() else shutil.which(tool)
    if command is None:
        assert importlib.util.find_spec("ruff") is None, "the project's environment lacks a tool that it installs"
        pytest.skip(f"{tool} is not installed here; `make setup` installs it")
    done = subprocess.run([command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr


def test_lint_finds_nothing():
    run("ruff", "check", "--no-cache", ".", timeout_s=60)


def test_files_are_formatted():
    run("ruff", "format", "--no-cache", "--check", ".", timeout_s=60)


def test_types_agree():
    run("mypy", timeout_s=280)
