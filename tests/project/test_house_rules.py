"""The project's files speak of the project alone, in its own form."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = {".py", ".md", ".toml", ".txt", ".sh", ".yaml", ".yml", ".html", ".cfg", ""}
FOREIGN = re.compile(
    r"/work/|/tmp/|/root/|/home/\w|pypi\.org|pythonhosted|download\.pytorch|registry\.npmjs|deb\.debian", re.IGNORECASE
)
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "manager", "misc", "common"}
LONGEST_MODULE = 400
LONGEST_FUNCTION = 80


def tracked() -> list[Path]:
    """Return the files that belong to the project: under version control, or all of an unpacked copy."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.splitlines() if (path := ROOT / name).is_file()]


def test_no_file_names_a_machine_or_a_registry():
    found = []
    for path in tracked():
        if path.suffix in TEXT and path != Path(__file__):
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
                if FOREIGN.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_modules_are_named_for_what_they_hold():
    assert not [path for path in tracked() if path.suffix == ".py" and path.stem in VAGUE_NAMES]


def test_modules_and_functions_stay_readable():
    import ast

    long = []
    for path in tracked():
        if path.suffix != ".py" or path.relative_to(ROOT).parts[0] not in ("flows", "tasks", "verl_omni_core"):
            continue
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        if lines > LONGEST_MODULE:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > LONGEST_FUNCTION:
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {size} lines")
    assert not long, "\n".join(long)


def test_no_file_is_larger_than_the_embedded_model_may_be():
    assert not [path for path in tracked() if path.stat().st_size > 12 * 10**6]


def test_top_level_holds_what_the_layout_names():
    allowed = {
        *("flows", "tasks", "verl_omni_core", "profiles", "tests", "benchmarks", "scripts", "docs", "requirements"),
        *("pyproject.toml", "README.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "prefect.yaml", ".ci", ".gitignore"),
        ".pre-commit-config.yaml",
    }
    assert {path.relative_to(ROOT).parts[0] for path in tracked()} <= allowed
