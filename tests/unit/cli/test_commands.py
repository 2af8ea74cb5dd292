"""Commands on runs that exist: exit codes, one message, and what they print. Nothing is started."""

import pytest
from typer.testing import CliRunner

from verl_omni_core.cli import evaluate, main
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store.lease import take_ownership
from verl_omni_core.store.runs import create_run, open_run

PROFILE = "glyph-flow_grpo-ocr-cpu"


def invoke(*arguments: str):
    return CliRunner().invoke(main.app, list(arguments))


@pytest.fixture
def store(tmp_path):
    """A store with a run that never took a step, and an evaluation."""
    folder = tmp_path / "runs"
    config = RunConfig().model_dump(mode="json")
    create_run(folder, config, code_version="1", run_id="young")
    create_run(folder, config, code_version="1", run_id="judged", kind="evaluate")
    open_run(folder, "judged").write_progress(status="finished", step=0, reward=0.5)
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("export", "none", "--out", "x"), 2, "no run 'none'; it has judged, young"),
        (("export", "young", "--out", "x"), 2, "no step of it has any yet"),
        (("export", "young", "--out", "x", "--step", "3"), 2, "no weights of the policy after step 3"),
        (("evaluate", "none"), 2, "neither a run nor a profile"),
        (("evaluate", "young"), 2, "no step of it has any yet"),
        (("evaluate", PROFILE, "--step", "3"), 2, "is a profile, which has no steps"),
        (("evaluate", PROFILE, "--prompts", "gone.parquet"), 2, "data.validation"),
        (("evaluate", PROFILE, "--adapter", "gone"), 2, "--adapter: 'gone' holds neither"),
        (("evaluate", PROFILE, "--set", "rollout.n=3"), 2, "rollout.group_size"),
        (("evaluate", PROFILE, "--set", "run.store=elsewhere"), 2, "name the store with --store"),
        (("evaluate", PROFILE, "--set", "run.steps=3"), 2, "sets run.steps itself"),
        (("fork", "none"), 2, "no run 'none'; it has judged, young"),
        (("fork", "young"), 2, "has no snapshot yet; it has none (run.checkpoint_every = 10)"),
        (("fork", "young", "--step", "3"), 2, "has no snapshot of step 3"),
        (("fork", "judged"), 2, "'judged' is an evaluation"),
        (("teardown", "none"), 1, "no run 'none'"),
    ],
)
def test_what_is_not_there_ends_with_one_message(store, arguments, code, message):
    before = sorted(store.iterdir())
    done = invoke(*arguments, "--store", str(store))
    assert done.exit_code == code, done.output
    assert done.stderr.startswith("Error: ") and message in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == "" and sorted(store.iterdir()) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "young"),
        ("export", "young", "--out", "x", "--format", "pickle"),
        ("export", "young", "--out", "x", "--step", "-1"),
        ("evaluate",),
        ("evaluate", "young", "--network", "best"),
        ("fork",),
        ("fork", "young", "--step", "0"),
    ],
)
def test_arguments_that_cannot_be_are_refused_with_code_2(store, arguments):
    done = invoke(*arguments, "--store", str(store))
    assert done.exit_code == 2 and "Usage:" in done.stderr


def test_a_run_that_somebody_drives_is_not_torn_down(store):
    with take_ownership(store / "young", "somebody"):
        done = invoke("teardown", "young", "--store", str(store))
    assert done.exit_code == 1 and "owned by somebody" in done.stderr


def test_a_run_without_actors_is_torn_down_without_starting_a_cluster(store, monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_OMNI_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = invoke("teardown", "young", "--store", str(store))
    assert done.exit_code == 0 and done.stdout == "ended 0 actors of young\n"
    assert list((tmp_path / "home").iterdir()) == []


def test_runs_are_listed_whole_oldest_first(store):
    lines = invoke("runs", "--store", str(store)).stdout.splitlines()
    assert lines[0].split()[:5] == ["run", "kind", "status", "steps", "reward"]
    listed = {line.split()[0]: line.split()[1:5] for line in lines[1:]}
    assert listed == {
        "young": ["train", "new", "0/30", "-"],
        "judged": ["evaluate", "finished", "-", "0.5000"],
    }


def test_a_store_without_runs_says_how_to_start_one(tmp_path):
    assert "verl-omni train" in invoke("runs", "--store", str(tmp_path / "none")).stdout


def test_down_says_what_did_not_run(monkeypatch, tmp_path):
    monkeypatch.setenv("VERL_OMNI_HOME", str(tmp_path))
    done = invoke("down")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == ["ray-head: was not running", "prefect-server: was not running"]


JUDGED = {"step": 0, "std": 0.25, "best": {2: 0.75, 4: 1.0}, "worst": {2: 0.25, 4: 0.0}, "invalid": 0.0,
          "prompts": 8, "samples_per_prompt": 4}  # fmt: skip


def test_an_evaluation_is_printed_as_a_table_with_its_interval():
    text = evaluate.text_of(
        {
            "judged": [
                {**JUDGED, "label": "base", "mean": 0.5, "exact": 0.1},
                {**JUDGED, "label": "policy after step 9", "mean": 0.625, "exact": None, "invalid": 0.05},
            ],
            "gain": {"mean": 0.125, "low": 0.05, "high": 0.2},
            "picture": "p.png",
            "folder": "runs/x",
        }
    )
    lines = text.splitlines()
    assert lines[2].split() == ["mean", "std", "best@2", "best@4", "worst@2", "worst@4", "exact"]
    assert lines[3].split() == ["base", "0.5000", "0.2500", "0.7500", "1.0000", "0.2500", "0.0000", "0.1000"]
    assert lines[4].split()[-8:] == ["9", "0.6250", "0.2500", "0.7500", "1.0000", "0.2500", "0.0000", "-"]
    assert len({len(line) for line in lines[2:5]}) == 1
    assert "5.0% of the samples have no score" in text
    assert "Gain: +0.1250, paired bootstrap 95 % interval +0.0500 to +0.2000" in text


def test_an_evaluation_of_one_model_claims_no_gain():
    judged = [{**JUDGED, "label": "base", "mean": 0.5, "exact": 0.1}]
    text = evaluate.text_of({"judged": judged, "gain": None, "picture": "p.png", "folder": "runs/x"})
    assert "Gain" not in text
