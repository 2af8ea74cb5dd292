"""The command line: exit codes, one message, and the settings it prints."""

import json
import tomllib

import pytest
import typer
from typer.testing import CliRunner

from verl_omni_core import errors
from verl_omni_core.cli import main
from verl_omni_core.cli.config import toml_value

LOOP = "rollout.agent_loop=types:SimpleNamespace"
PROFILE = "glyph-flow_grpo-ocr-cpu"


def invoke(*arguments: str):
    return CliRunner().invoke(main.app, list(arguments))


def test_config_prints_every_setting_with_its_origin(monkeypatch):
    monkeypatch.setenv("VERL_OMNI_RUN__SEED", "7")
    done = invoke("config", PROFILE, "--set", "run.steps=4")
    assert done.exit_code == 0
    lines = {line.partition(" = ")[0]: line for line in reversed(done.stdout.splitlines())}  # the first of a name stays
    assert lines["steps"].endswith("# --set run.steps=4")
    assert lines["seed"].endswith("# environment VERL_OMNI_RUN__SEED")
    assert lines["grid"].endswith(f"# profile {PROFILE}")
    assert lines["store"].endswith("# default")


def test_config_prints_a_profile_that_resolves_to_itself(tmp_path):
    from verl_omni_core.settings.loader import load

    printed = invoke("config", PROFILE, "--set", "algorithm.options={std_epsilon=1e-4}").stdout
    assert tomllib.loads(printed)["run"]["steps"] == load(PROFILE).config.run.steps
    path = tmp_path / "again.toml"
    path.write_text(printed)
    expected = load(PROFILE, overrides=["algorithm.options.std_epsilon=1e-4"], environ={}).config
    assert load(path, environ={}).config == expected


@pytest.mark.parametrize("how", ["--prefect", "--no-prefect"])
def test_train_hands_the_origins_of_its_settings_to_the_run(monkeypatch, tmp_path, how):
    from verl_omni_core import online as plain
    from verl_omni_core.cli import train

    given = {}

    def run(config, origins):
        given[config.run.id] = origins
        return "trained"

    monkeypatch.setattr(train, "surround", lambda *_, **__: None)
    monkeypatch.setattr(train, "flow", lambda name: run if name == "online" else None)
    monkeypatch.setattr(plain, "train", run)
    monkeypatch.setenv("VERL_OMNI_RUN__SEED", "7")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a sign"}\n')
    sets = [f"data.{split}={prompts}" for split in ("train", "validation")]
    done = invoke("train", PROFILE, how, "--run-id", "r", *(part for change in sets for part in ("--set", change)))
    assert done.exit_code == 0 and done.stdout == "trained\n"
    origins = given["r"]
    assert origins["profile"] == PROFILE and origins["sampler.grid"] == f"profile {PROFILE}"
    assert origins["run.id"] == "argument" and origins["run.seed"] == "environment VERL_OMNI_RUN__SEED"
    assert origins["data.train"] == f"--set {sets[0]}" and origins["run.store"] == "default"


@pytest.mark.parametrize(("status", "code"), [("stopped", 75), ("finished", 0)])
def test_a_run_that_stopped_for_its_machines_end_asks_to_be_started_again(monkeypatch, tmp_path, status, code):
    from verl_omni_core.cli import train
    from verl_omni_core.store.runs import create_run

    def run(config, origins):
        made = create_run(config.run.store, config.model_dump(mode="json"), code_version="1", run_id=config.run.id)
        made.write_progress(status=status, step=1)
        return "what it says"

    monkeypatch.setattr(train, "surround", lambda *_, **__: None)
    monkeypatch.setattr(train, "flow", lambda name: run)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "32503680000")
    done = invoke("train", PROFILE, "--run-id", "r", "--set", f"run.store={tmp_path}")
    assert (done.exit_code, done.stdout) == (code, "what it says\n")


def test_config_prints_the_settings_as_a_deployment_takes_them():
    from verl_omni_core.settings.loader import load
    from verl_omni_core.settings.run import RunConfig

    done = invoke("config", PROFILE, "--set", "run.steps=4", "--check", "--json")
    (line,) = done.stdout.splitlines()
    assert RunConfig.model_validate(json.loads(line)) == load(PROFILE, overrides=["run.steps=4"], environ={}).config
    assert "this run can start" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("config", "no-such-profile"),
        ("config", PROFILE, "--set", "rollout.n=4"),
        ("config", PROFILE, "--set", "run.steps=x"),
        ("config", PROFILE, "--check", "--set", "data.train=nowhere.parquet", "--set", LOOP),
    ],
)
def test_settings_that_cannot_work_end_with_one_message_and_code_2(arguments):
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: ") and "Traceback" not in done.stderr


def test_an_unknown_option_ends_with_code_2():
    assert invoke("config", "--no-such-option").exit_code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("x"), 2),
        (errors.UnknownNameError("x"), 2),
        (errors.DataError("x"), 2),
        (errors.EngineError("x"), 1),
        (errors.StoreError("x"), 1),
        (errors.FencedError("x"), 1),
    ],
)
def test_exit_code_tells_what_cannot_start_from_what_failed(error, code):
    app = typer.Typer(cls=main._ReportingGroup)
    app.callback()(main._options)

    @app.command()
    def fail() -> None:
        raise error

    done = CliRunner().invoke(app, ["fail"])
    assert done.exit_code == code and done.stderr == "Error: x\n"
    shown = CliRunner().invoke(app, ["--debug", "fail"])
    assert shown.exit_code == code and "Traceback" in shown.stderr


def test_an_unexpected_error_is_not_swallowed():
    app = typer.Typer(cls=main._ReportingGroup)
    app.callback()(main._options)

    @app.command()
    def fail() -> None:
        raise KeyError("a bug")

    assert isinstance(CliRunner().invoke(app, ["fail"]).exception, KeyError)


def test_version_is_printed():
    import verl_omni_core

    assert invoke("--version").stdout.strip() == verl_omni_core.__version__


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (1e-5, "1e-05"),
        ('a"b', '"a\\"b"'),
        (["a", 1], '["a", 1]'),
        ({"a b": 1, "c": None, "d": {"e": 2}}, '{ "a b" = 1, d = { e = 2 } }'),
    ],
)
def test_values_are_written_as_toml(value, text):
    assert toml_value(value) == text
    tomllib.loads(f"value = {text}")
