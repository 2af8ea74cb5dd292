"""Weights of a real run in stock diffusers: the engine's own pictures come out, with flow and actors out of the way."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.export import export as export_flow
from tests.flows import small
from tests.flows.conftest import Ran
from verl_omni_core.cluster.start import start
from verl_omni_core.settings import resolve
from verl_omni_core.settings.run import ClusterSettings
from verl_omni_core.stages.export import export

pytestmark = pytest.mark.engine


class _Complaints(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _draw(pipe: Any, ran: Ran) -> np.ndarray:
    """Draw the run's first held-out sample of each prompt with a stock pipeline; uint8 [N, 3, H, W]."""
    sampler, validation = ran.config.sampler, ran.config.sampler.validation
    ref = ran.recorded.ref(small.STEPS, "validate-samples")
    prompts = ran.recorded.store.table(ref, "prompts").column("prompt").to_pylist()
    seeds = ran.recorded.store.table(ref, "trajectories").column("seed").to_pylist()[:: small.HELD_OUT_SAMPLES]
    steps = validation.num_inference_steps
    pipe.set_progress_bar_config(disable=True)
    drawn = [
        pipe(
            prompt,
            height=sampler.height,
            width=sampler.width,
            guidance_scale=1.0,
            max_sequence_length=sampler.max_sequence_length,
            sigmas=[1 - i / steps for i in range(steps)],
            generator=torch.Generator().manual_seed(seed),
            output_type="np",
        ).images[0]
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    return (np.stack(drawn).transpose(0, 3, 1, 2) * 255).round().astype(np.int64)


def _stock(folder: Path) -> Any:
    return StableDiffusion3Pipeline.from_pretrained(str(folder), torch_dtype=torch.float32)


@pytest.fixture(scope="module")
def drawn(flow: Ran) -> np.ndarray:
    """What the engine drew with the average after the last step."""
    return flow.recorded.pixels(small.STEPS, "validate-samples").numpy()[:: small.HELD_OUT_SAMPLES].astype(np.int64)


def test_an_exported_adapter_draws_the_engines_pictures_in_stock_diffusers(flow, drawn, tmp_path):
    done = export(str(flow.config.run.id), tmp_path / "out", store=flow.config.run.store)
    assert (done.network, done.step) == ("average", small.STEPS)
    pipe = _stock(resolve.model_path(flow.config))
    base = _draw(pipe, flow)
    complaints = _Complaints()  # where diffusers tells of missing and unexpected keys
    logging.getLogger("diffusers").addHandler(complaints)
    try:
        pipe.load_lora_weights(done.folder)
    finally:
        logging.getLogger("diffusers").removeHandler(complaints)
    assert not [text for text in complaints.texts if re.search("(missing|unexpected) keys", text, re.IGNORECASE)]
    found = _draw(pipe, flow)
    # a value of exactly one half rounds either way
    assert np.abs(found - drawn).max() <= 1
    assert np.abs(found - base).max() > 1


@pytest.fixture
def prefect(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Prefect server for flows in this process."""
    monkeypatch.setenv("PREFECT_API_URL", "")
    monkeypatch.delenv("PREFECT_API_URL")
    address = start(ClusterSettings(), with_prefect=True, say=lambda line: None).prefect_url
    with temporary_settings({PREFECT_API_URL: address}):
        yield


def test_the_flow_exports_a_pipeline_that_draws_the_engines_pictures(flow, drawn, prefect, tmp_path):
    done = export_flow(
        run_id=str(flow.config.run.id), out=str(tmp_path / "out"), format="diffusers", store=flow.config.run.store
    )
    assert np.abs(_draw(_stock(done["folder"]), flow) - drawn).max() <= 1
