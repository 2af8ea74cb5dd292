"""Pipelines and engines of the parity tests; an engine starts once a session."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import verl_omni_core
from tests.parity.engine_process import EngineProcess, Pipeline, engine_process
from verl_omni_core.models import sd3
from verl_omni_core.rollout._contract import SamplingParams

GLYPH = Path(verl_omni_core.__file__).parent / "glyph" / "pipeline"


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
    return Pipeline(
        str(folder), "a red cube", SamplingParams(32, 48, 6, "flow_sde", {}, "uniform", 0.7, (0, 3), 1.0, 16)
    )


@pytest.fixture(scope="session")
def omni(pipeline: Pipeline) -> Iterator[EngineProcess]:
    with engine_process("vllm_omni", pipeline.folder) as engine:
        yield engine


@pytest.fixture(scope="session")
def reference(pipeline: Pipeline) -> Iterator[EngineProcess]:
    with engine_process("diffusers", pipeline.folder) as engine:
        yield engine
