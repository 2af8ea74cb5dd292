"""Bad input ends before anything starts, in one readable message."""

import json
import shutil
import sys
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from verl_omni_core import registry
from verl_omni_core.errors import ConfigError, DataError, UnknownNameError
from verl_omni_core.settings import resolve
from verl_omni_core.settings.check import check
from verl_omni_core.settings.loader import load

PROMPTS = [{"prompt": f"word {n}", "ground_truth": f"word {n}"} for n in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny pipeline folder with real tokenizers."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    registry.component("model", "sd3").build(None).build_tiny(str(folder), seed=0)
    return folder


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def run(model, tmp_path):
    """Return a run's settings that are good but for what is given."""
    prompts = write(tmp_path / "prompts.jsonl", PROMPTS)

    def make(**changes):
        good = {
            "model.path": str(model),
            "data.train": prompts,
            "data.validation": prompts,
            "rollout.agent_loop": "types:SimpleNamespace",
            "rollout.name": "diffusers",
        }
        explicit = good | {name.replace("__", "."): value for name, value in changes.items()}
        return load("glyph-flow_grpo-ocr-cpu", explicit=explicit, environ={}).config

    return make


def refusal(config, error=ConfigError):
    with pytest.raises(error) as caught:
        check(config)
    return str(caught.value)


def test_a_good_run_passes_and_is_described(run, model):
    found = check(run())
    assert found.model_path == model
    assert found.rows == {"train": 4, "validation": 4}
    assert found.notes == []


@pytest.mark.parametrize(
    ("setting", "value", "key", "nearest"),
    [
        ("model__name", "sd4", "model.name", "'sd3'"),
        ("algorithm__name", "flow_gpro", "algorithm.name", "'flow_grpo'"),
        ("sampler__name", "flow_sed", "sampler.name", "'flow_sde'"),
        ("rollout__name", "vllm_omi", "rollout.name", "'vllm_omni'"),
        ("reward__scorers", [{"name": "ocrr"}], "reward.scorers", "'ocr'"),
        ("reward__scorers", [{"name": "ocr", "options": {"upscal": 2}}], "reward.scorers", "'upscale'"),
        ("algorithm__options", {"std_epsilo": 1}, "algorithm.options", "'std_epsilon'"),
    ],
)
def test_unknown_components_and_options_are_answered_with_the_nearest(run, setting, value, key, nearest):
    message = refusal(run(**{setting: value}), ConfigError if setting == "algorithm__name" else UnknownNameError)
    assert message.startswith(f"{key}: ") and nearest in message
    assert "\n" not in message


def test_an_option_out_of_range_is_refused(run):
    message = refusal(run(reward__scorers=[{"name": "ocr", "options": {"upscale": 99}}]))
    assert "upscale" in message and "16" in message and "99" in message


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("algorithm__options", {"std_epsilon": "1e-4"}),
        ("algorithm__options", {"std_epsilon": True}),
        ("sampler__options", {"include_logprob_normalizer": 1}),
        ("reward__scorers", [{"name": "jpeg_size", "options": {"quality": True}}]),
        ("reward__scorers", [{"name": "ocr", "options": {"upscale": 2.5}}]),
    ],
)
def test_an_option_of_the_wrong_type_is_refused(run, setting, value):
    options = value if isinstance(value, dict) else value[0]["options"]
    ((name, seen),) = options.items()
    message = refusal(run(**{setting: value}))
    assert f"option {name}: Input should be" in message and f"got {seen!r}" in message


def test_an_option_may_be_a_whole_number_where_a_number_is_expected(run):
    assert resolve.algorithm_options(run(algorithm__options={"std_epsilon": 1})).std_epsilon == 1.0


def test_a_package_outside_the_tree_that_is_missing_is_told(run):
    message = refusal(run(reward__scorers=[{"name": "no_such_package.scorer"}]))
    assert "no_such_package.scorer" in message and "install" in message


def test_a_group_of_one_is_refused_where_groups_are_compared(run):
    message = refusal(run(rollout__group_size=1))
    assert "rollout.group_size is 1" in message and "at least 2" in message


def test_a_group_of_one_is_allowed_where_groups_are_not_compared(run, monkeypatch):
    algorithm = registry.component("algorithm", "flow_grpo")
    monkeypatch.setattr(algorithm, "COMPARES_GROUP", False, raising=False)
    check(run(rollout__group_size=1))


def test_prompts_that_updates_do_not_divide_are_refused(run):
    with pytest.raises(ConfigError, match=r"training.prompts_per_update is 5.*data.prompts_per_step 12; use one of"):
        run(training__prompts_per_update=5)


@pytest.mark.parametrize("changes", [{"training__micro_batch": 7}, {"training__ranks": 2, "training__micro_batch": 5}])
def test_uneven_micro_batches_and_ranks_are_legal(run, changes):
    check(run(**changes))


def test_a_size_that_the_vae_cannot_make_is_refused_with_the_nearest(run):
    message = refusal(run(sampler__height=40, sampler__width=100))
    assert "sampler.height is 40" in message and "32 or 48" in message


def test_a_deterministic_sampler_is_refused_where_ratios_are_needed(run):
    message = refusal(run(sampler__name="ode"))
    assert "sampler.name is 'ode'" in message and "flow_sde" in message
    assert "sampler.noise_level is 0" in refusal(run(sampler__noise_level=0.0))


@pytest.mark.parametrize("bounds", [[3, 2], [-1, 3], [0, 9], [2, 2], [0, 8], [7, 8]])
def test_a_window_outside_the_steps_or_with_the_last_one_is_refused(run, bounds):
    message = refusal(run(sampler__sde_window_range=bounds, sampler__sde_window_size=1))
    assert f"sampler.sde_window_range is [{bounds[0]}, {bounds[1]})" in message and "lie in [0, 7)" in message


def test_a_window_up_to_the_last_step_is_legal(run):
    check(run(sampler__sde_window_range=[3, 7], sampler__sde_window_size=4))


def test_a_window_wider_than_its_range_is_refused(run):
    message = refusal(run(sampler__sde_window_size=5))
    assert "sampler.sde_window_size is 5" in message and "holds 1 to 4 steps" in message


@pytest.mark.parametrize("rule", ["cps", "flow_ddim", "ddim"])
def test_more_noise_than_the_rule_takes_is_refused(run, rule):
    check(run(sampler__name=rule, sampler__noise_level=1.0))
    message = refusal(run(sampler__name=rule, sampler__noise_level=1.25))
    assert f"sampler.noise_level is 1.25, but sampler '{rule}' takes 0 to 1" in message
    check(run(sampler__name="flow_sde", sampler__noise_level=1.25))


@pytest.mark.parametrize(
    ("scorers", "said"),
    [
        ([{"name": "ocr"}, {"name": "jpeg_size"}, {"name": "ocr"}], "names 'ocr' more than once"),
        ([{"name": "ocr", "weight": 0.0}], "positive sum"),
        ([{"name": "ocr", "weight": 1.0}, {"name": "jpeg_size", "weight": -2.0}], "their sum -1.0"),
    ],
)
def test_scorers_that_make_no_reward_are_refused(run, scorers, said):
    message = refusal(run(reward__scorers=scorers))
    assert message.startswith("reward.scorers") and said in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout__tensor_parallel": 2}, "rollout.tensor_parallel is 2"),
        ({"rollout__options": {"max_cpu_loras": 2}}, "takes no rollout.options, got ['max_cpu_loras']"),
        ({"rollout__name": "vllm_omni", "rollout__options": {"dtype": "bfloat16"}}, "may not set ['dtype']"),
    ],
)
def test_what_the_engine_would_refuse_is_refused_before_it_starts(run, changes, said):
    assert said in refusal(run(**changes))


def test_an_architecture_that_the_engine_has_no_pipeline_for_is_refused(run, monkeypatch):
    from verl_omni_core.rollout.vllm_omni import plugins

    monkeypatch.delitem(plugins.PIPELINES, "StableDiffusion3Pipeline")
    monkeypatch.setitem(plugins.PIPELINES, "FluxPipeline", "FluxTrajectoryPipeline")
    message = refusal(run(rollout__name="vllm_omni"))
    assert "StableDiffusion3Pipeline, for which there is no vLLM-Omni pipeline" in message and "FluxPipeline" in message


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"targets": ["attn.to_z"]}, "model.lora.targets: 'attn.to_z' matches no linear module"),
        ({"exclude": ["attn.to_z"]}, "model.lora.exclude: 'attn.to_z' matches no linear module"),
        ({"exclude": ["to_q"], "targets": ["attn.to_q"]}, "model.lora.exclude ['to_q'] leaves no module"),
        ({"adapter_path": "nowhere"}, "model.lora.adapter_path: 'nowhere/adapter_config.json' does not exist"),
        ({"adapter_path": "nowhere", "rank": 0}, "model.lora.rank is 0"),
    ],
)
def test_adapters_that_fit_nothing_are_refused(run, lora, said):
    config = run(**{f"model__lora__{name}": value for name, value in lora.items()})
    message = refusal(config)
    assert said in message
    if "matches no" in said:
        assert "did you mean" in message and "'attn.to_q'" in message
    assert check(config, splits=("validation",)).rows == {"validation": 4}  # an evaluation has no trainer


def test_an_adapter_to_start_from_is_refused_unless_it_fits(run, tmp_path):
    config = run(model__lora__rank=2, model__lora__targets=["attn.to_q"], model__lora__adapter_path=str(tmp_path))
    shapes = {"lora_A": (2, 16), "lora_B": (16, 2)}
    tensors = {
        f"base_model.model.transformer_blocks.{block}.attn.to_q.{part}.weight": torch.zeros(shape)
        for block in (0, 1)
        for part, shape in shapes.items()
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 32, "target_modules": ["to_q"]}))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    check(config)
    save_file(dict(list(tensors.items())[1:]), tmp_path / "adapter_model.safetensors")
    assert "the adapter does not fit: 1 tensors missing" in refusal(config)


def test_a_missing_model_folder_is_told(run, tmp_path):
    assert "model.path is 'nowhere'" in refusal(run(model__path="nowhere"))
    assert "hf download some/where" in refusal(run(model__path="some/where"))
    assert "model_index.json" in refusal(run(model__path=str(tmp_path)))


def test_another_pipelines_folder_is_refused(run, tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    message = refusal(run(model__path=str(tmp_path)))
    assert "FluxPipeline" in message and "StableDiffusion3Pipeline" in message


@pytest.mark.parametrize("part", ["vae", "transformer", "tokenizer_2", "scheduler"])
def test_a_pipeline_without_one_of_its_parts_is_refused(run, model, tmp_path, part):
    shutil.copytree(model, tmp_path / "torn", ignore=shutil.ignore_patterns(part))
    message = refusal(run(model__path=str(tmp_path / "torn")))
    assert message.startswith("model.path") and f"torn/{part}" in message


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_missing_data_file_is_told(run, split):
    message = refusal(run(**{f"data__{split}": "nowhere.parquet"}), DataError)
    assert f"data.{split} is 'nowhere.parquet'" in message


def test_data_without_the_prompt_column_is_refused_with_the_nearest(run):
    message = refusal(run(data__prompt_column="promt"), DataError)
    assert "data.train" in message and "'promt'" in message and "'prompt'" in message


def test_a_row_that_names_no_agent_loop_is_refused_with_the_nearest(run, tmp_path):
    rows = [{**PROMPTS[0], "agent_name": "diffusion_single_turn_agnt"}, {**PROMPTS[1], "agent_name": None}]
    message = refusal(run(data__train=write(tmp_path / "agents.jsonl", rows)), DataError)
    assert message.startswith("data.train, column 'agent_name': ") and "'diffusion_single_turn_agent'" in message


def test_an_empty_data_set_is_refused(run, tmp_path):
    assert "has no rows" in refusal(run(data__train=write(tmp_path / "none.jsonl", [])), DataError)


def test_an_unreadable_row_is_reported_with_its_number(run, tmp_path):
    path = tmp_path / "torn.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": \n{"prompt": "d"}\n')
    assert "row 2 (line 3)" in refusal(run(data__train=str(path)), DataError)


def test_a_prompt_longer_than_an_encoder_takes_is_refused_or_cut_and_counted(run, tmp_path):
    prompts = write(tmp_path / "long.jsonl", [*PROMPTS, {"prompt": "word " * 200}, {"prompt": "w " * 300}])
    message = refusal(run(data__train=prompts), DataError)
    assert "data.train, row 4" in message and "data.overlong" in message and "takes" in message
    found = check(run(data__train=prompts, data__overlong="truncate"))
    assert found.truncated == {"train": 2, "validation": 0}
    assert found.notes == ["data.train: 2 of 6 prompts are longer than a text encoder takes and are cut"]


def test_an_engine_that_is_missing_or_not_admitted_is_refused(run, monkeypatch):
    engine = ModuleType("outside_engine")

    def installed_version():
        raise ConfigError("rollout.name is 'x', but x 9.9 is not admitted; install one of 0.30.0")

    engine.installed_version = installed_version
    outside = ModuleType("outside")
    outside.engine = engine
    monkeypatch.setitem(sys.modules, "outside", outside)
    assert "x 9.9 is not admitted" in refusal(run(rollout__name="outside:engine"))


@pytest.mark.parametrize("version", [None, "0.25.0", "0.31.0"])
def test_vllm_omni_itself_is_refused_when_missing_or_not_admitted(run, monkeypatch, version):
    import importlib.metadata

    real = importlib.metadata.version

    def pretended(name):
        if name != "vllm-omni":
            return real(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", pretended)
    message = refusal(run(rollout__name="vllm_omni"))
    assert (
        message.startswith("rollout.name is 'vllm_omni'")
        and "0.30.0 is known to work" in message
        and ("not installed" in message if version is None else version in message)
    )


def test_an_admitted_engine_that_the_tests_do_not_run_with_is_noted(run, monkeypatch):
    from verl_omni_core.rollout.vllm_omni import compat

    monkeypatch.setattr(compat, "_version", lambda name: "0.26.0")
    note = "rollout.name: version 0.26.0 of the engine is admitted, but the tests run with 0.30.0"
    assert check(run(rollout__name="vllm_omni")).notes == [note]
    monkeypatch.setattr(compat, "_version", lambda name: "0.30.0+cpu")
    assert check(run(rollout__name="vllm_omni")).notes == []


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        ({"rollout__dtype": "bfloat16"}, ["rollout.dtype is 'bfloat16' and model.dtype 'float32'"]),
        ({"rollout__dtype": "bfloat16", "model__dtype": "bfloat16"}, []),
        (
            {"rollout__dtype": "bfloat16", "model__dtype": "bfloat16", "algorithm__clip_range": 1e-5},
            ["algorithm.clip_range is 1e-05"],
        ),
        (
            {
                "rollout__dtype": "bfloat16",
                "model__dtype": "bfloat16",
                "algorithm__clip_range": 1e-5,
                "algorithm__recompute_old_log_probs": True,
            },
            [],
        ),
        ({"algorithm__clip_range": 1e-5}, []),
    ],
)
def test_low_precision_against_a_tiny_clip_range_is_noted(run, changes, noted):
    good = {"algorithm__clip_range": 0.1}
    notes = check(run(**good | changes)).notes
    assert [note[: len(start)] for note, start in zip(notes, noted, strict=True)] == noted


def test_all_faults_come_in_one_message(run):
    message = refusal(run(rollout__group_size=1, sampler__height=33, data__train="nowhere.parquet"))
    assert len(message.splitlines()) == 3


def test_a_shared_setting_that_an_algorithm_lacks_is_refused(run, monkeypatch):
    from dataclasses import make_dataclass

    algorithm = registry.component("algorithm", "flow_grpo")
    monkeypatch.setattr(algorithm, "Options", make_dataclass("Options", [("clip_range", float, 1e-4)], frozen=True))
    message = refusal(run(algorithm__kl_coef=0.5))
    assert "algorithm.kl_coef is 0.5" in message and "clip_range" in message


def test_a_shared_setting_given_twice_is_refused(run):
    message = refusal(run(algorithm__clip_range=1e-3, algorithm__options={"clip_range": 1e-3}))
    assert "algorithm.clip_range and algorithm.options.clip_range" in message


def test_unset_shared_settings_take_the_algorithms_own_default(run):
    options = resolve.algorithm_options(run(algorithm__adv_clip=2.0))
    default = registry.options("algorithm", "flow_grpo", {})
    assert options.adv_clip == 2.0 and options.clip_range == 1e-3
    assert options.global_std == default.global_std


def test_checking_writes_nothing(run, tmp_path, monkeypatch):
    config = run()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    check(config)
    with pytest.raises(ConfigError):
        check(run(rollout__group_size=1))
    assert sorted(tmp_path.rglob("*")) == before
