"""Pipelines and engines of the parity tests; an engine starts once a session."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import verl_omni_core
from engine_process import EngineProcess
from verl_omni_core.models import sd3
from verl_omni_core.rollout._contract import EngineOptions, SamplingParams

GLYPH = Path(verl_omni_core.__file__).parent / "glyph" / "pipeline"


@dataclass(frozen=True)
class Pipeline:
    """A folder and what its tests ask it for."""

    folder: str
    prompt: str
    sampling: SamplingParams


def _options(folder: str, **changes: Any) -> EngineOptions:
    values = dict(model="sd3", path=folder, dtype="float32", max_batch=8, batch_wait_ms=50.0, threads=1,
                  tensor_parallel=1, lora_rank=4, deterministic=False, start_timeout_s=170.0, request_timeout_s=60.0,
                  )  # fmt: skip
    return EngineOptions(**values | changes)


@pytest.fixture(scope="session", params=["tiny", "glyph"])
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    if request.param == "glyph":
        if not GLYPH.is_dir():
            pytest.skip("glyph is not in this tree")
        folder = tmp_path_factory.mktemp("glyph") / "pipeline"
        shutil.copytree(GLYPH, folder)
        sampling = SamplingParams(32, 96, 6, "flow_sde", {}, "uniform", 0.7, (0, 3), 1.0, 16)
        return Pipeline(str(folder), 'the text "A7X2"', sampling)
    folder = tmp_path_factory.mktemp("tiny")
    sd3.build(None).build_tiny(str(folder), seed=0)
    return Pipeline(str(folder), "a red cube", SamplingParams(32, 48, 6, "flow_sde", {}, "uniform", 0.7, (0, 3), 1.0, 16))


def engine_process(name: str, folder: str, **changes: Any) -> EngineProcess:
    """Return an engine that starts when it is entered; ``changes`` are fields of its options."""
    return EngineProcess(name, _options(folder, **changes))


@pytest.fixture(scope="session")
def omni(pipeline: Pipeline) -> Iterator[EngineProcess]:
    with engine_process("vllm_omni", pipeline.folder) as engine:
        yield engine


@pytest.fixture(scope="session")
def reference(pipeline: Pipeline) -> Iterator[EngineProcess]:
    with engine_process("diffusers", pipeline.folder) as engine:
        yield engine
