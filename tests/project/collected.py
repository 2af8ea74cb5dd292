"""The tests that pytest finds, with the markers that decide their tier."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def collected(files: tuple[str, ...]) -> frozenset[str]:
    """Return the ids, without parameters, of all tests that pytest collects from ``files``."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return frozenset(line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line)


def missing(tests: list[str]) -> list[str]:
    """Return which of ``tests`` (``path::name``) pytest does not find, those in files that do not exist included."""
    files = sorted({test.partition("::")[0] for test in tests})
    there = tuple(file for file in files if (ROOT / file).is_file())
    found = collected(there) if there else frozenset()
    return [test for test in tests if test not in found]


def is_full(test: str) -> bool:
    """Tell whether a test stands in the full tier: it, or its whole file, is marked so."""
    path, _, name = test.partition("::")
    if not (ROOT / path).is_file():
        return False  # that it is missing is another test's finding
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    marks = [ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            marks += [ast.unparse(decorator) for decorator in node.decorator_list]
    return any("pytest.mark.full" in mark for mark in marks)


def table(page: str) -> list[list[str]]:
    """Return the cells of all table rows of a page of docs/, without heads."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    heads = {index for index, row in enumerate(rows) if index + 1 < len(rows) and rows[index + 1].startswith("|--")}
    return [
        [cell.strip() for cell in row.strip("|").split("|")]
        for index, row in enumerate(rows)
        if index not in heads and not row.startswith("|--")
    ]
