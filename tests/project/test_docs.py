"""Pages of docs/ that can be wrong are checked: settings, public names, claims."""

import dataclasses
import importlib
import re
import subprocess
import sys

import pytest

from tests.project.collected import ROOT, is_full, missing, table
from verl_omni_core import registry

NAMES = table("public_names.md")
QUOTED = re.compile(r"`([^`]+)`")


def test_settings_page_is_current():
    command = [sys.executable, "scripts/make_settings_doc.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0, "docs/settings.md is not current; run `make docs`"


@pytest.mark.parametrize("kind", ["algorithm", "model", "reward", "sampler"])
def test_settings_page_has_every_option_of_every_component_with_its_meaning(kind):
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    for name in registry.names(kind):
        options = getattr(registry.component(kind, name), "Options", None)
        fields = [field.name for field in dataclasses.fields(options)] if options else []
        section = page.partition(f"\n### {kind} `{name}`")[2].partition("\n#")[0]
        rows = {line.split("|")[1].strip(" `"): line.split("|")[-2].strip() for line in section.splitlines()[4:]}
        assert list(rows) == fields
        assert all(meaning.endswith(".") for meaning in rows.values()), rows


@pytest.mark.parametrize(("name", "path", "members"), [row[:3] for row in NAMES], ids=[row[0] for row in NAMES])
def test_public_name_resolves_with_its_members_and_docstrings(name, path, members):
    found = getattr(importlib.import_module(path.strip("`")), name.strip("`"))
    assert found.__doc__, f"{name} has no docstring"
    for member in QUOTED.findall(members):
        assert getattr(found, member).__doc__, f"{name}.{member} has no docstring"


def test_every_public_name_names_an_existing_test():
    tests = {row[0]: QUOTED.findall(row[3]) for row in NAMES}
    without = [name for name, named in tests.items() if not named]
    assert not without, f"docs/public_names.md names no test for {without}"
    assert not missing([test for named in tests.values() for test in named])


def test_a_test_that_does_not_exist_is_noticed():
    assert missing(["tests/project/test_docs.py::test_settings_page_is_current"]) == []
    invented = ["tests/project/test_docs.py::test_nothing", "tests/nowhere.py::test_nothing"]
    assert missing(invented) == invented


def test_tiers_are_told_apart():
    assert not is_full("tests/project/test_docs.py::test_tiers_are_told_apart")
