"""What the README and the pages of docs/ say about commands, files, settings and stages is there."""

import importlib
import json
import pkgutil
import re

import pytest
import typer.main

from tests.project.collected import ROOT
from verl_omni_core import stages
from verl_omni_core.batches.schema import SCHEMAS
from verl_omni_core.cli.main import app
from verl_omni_core.settings import tree
from verl_omni_core.settings.loader import profile_names
from verl_omni_core.stages.trained import STAGES

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RUNNING = (ROOT / "docs" / "running.md").read_text()
COMMANDS = typer.main.get_command(app).commands
TYPED = [(page.name, line.strip()) for page in PAGES for line in re.findall(r"verl-omni [^`#\n]+", page.read_text())]
QUOTED = [(page.name, text) for page in PAGES[2:] for text in re.findall(r"`([^`\n]+)`", page.read_text())]
GROUPS = {name.partition(".")[0] for name in tree.fields()}


@pytest.mark.parametrize(("page", "line"), TYPED)
def test_every_command_of_a_page_exists_with_its_options(page, line):
    words = line.split()
    name = words[1].rstrip(".,;:)")
    assert name in COMMANDS, f"{page}: {line}"
    known = {option for parameter in COMMANDS[name].params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word.rstrip(".,;:)") for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_every_path_leads_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:verl_omni_core|flows|tasks|docs|tests)/[\w/.]*)[`:]", text):
        assert (ROOT / path).exists(), path


def test_every_setting_that_a_page_names_exists():
    named = {
        text.partition(" ")[0].partition("=")[0]
        for page, text in QUOTED
        if page in ("running.md", "architecture.md") and re.match(r"[a-z]+(\.[a-z_]+)+( = |$)", text)
    }
    named = {
        name for name in named if name.partition(".")[0] in GROUPS and name.rpartition(".")[2] not in ("json", "toml")
    }
    assert named and named <= set(tree.fields())


def test_every_profile_that_a_page_names_exists():
    named = {word for page in PAGES for word in re.findall(r"\b\w+-flow_grpo-\w+-\w+\b", page.read_text())}
    assert named and named <= set(profile_names())


def _rows(after: str) -> list[list[str]]:
    lines = RUNNING[RUNNING.index(after) :].splitlines()
    body = [line for line in lines[2:] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


def test_the_table_of_stages_is_complete_and_names_tables_that_exist():
    modules = [
        importlib.import_module(f"{stages.__name__}.{info.name}") for info in pkgutil.iter_modules(stages.__path__)
    ]
    constants = ("STAGE", "SAMPLES", "WEIGHTS", "RESULT", "PROBE")
    found = {value for module in modules for name in constants if isinstance(value := vars(module).get(name), str)}
    found |= set(STAGES.values()) | {"old_log_probs", "reference"}
    rows = _rows("| stage | writes |")
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row[0])} == found
    tables = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert tables <= set(SCHEMAS) and {"trajectories", "advantages"} <= tables


def test_the_benchmarks_page_reports_an_overhead_within_its_bounds():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    lines = [json.loads(line) for line in page.splitlines() if line.startswith('{"benchmark": "step_overhead"')]
    (line,) = [line for line in lines if line["pairs"] >= 10]
    assert line["equal_results"] is True
    percent = round(100 * (line["ratio_of_medians"] - 1))
    assert f"costs {percent} % more than the loop" in page
    assert line["in_memory_step_s"] >= 5 and line["ratio_of_medians"] <= 1.05
    assert line["noop_step_s"] <= 0.3


def test_the_readmes_python_runs_as_printed(monkeypatch, capsys):
    from verl_omni_core import online

    monkeypatch.setattr(online, "train", lambda config: f"{config.run.steps} steps of {config.model.path}")
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for _ in range(2):  # a name that hides a module would change its meaning with the first use
        exec(source, {})
    assert capsys.readouterr().out == "5 steps of glyph\n" * 2
