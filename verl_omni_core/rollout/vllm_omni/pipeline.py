"""Pipeline classes for the engine: its own network and encoders, driven by the model adapter and our denoising loop.

One mixin serves every model; a class joins it to the engine's pipeline of one architecture. Requests that carry no
:class:`verl_omni_core.rollout._contract.SampleRequest` take the engine's own path, so other users of the engine in the
same environment notice nothing.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.models.sd3 import pipeline_sd3
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

from verl_omni_core import registry
from verl_omni_core.models._contract import Encoders
from verl_omni_core.rollout._contract import SampleRequest
from verl_omni_core.rollout._drawing import BatchDrawer, Drawn

REQUEST, MODEL, MODEL_OPTIONS = "verl_omni_request", "verl_omni_model", "verl_omni_model_options"
"""Keys of the engine's ``extra_args`` that carry our request, and name and options of its model adapter."""

_NUMBERED = ("", "_2", "_3", "_4")


class TrajectoryPipeline:
    """Draws requests with recorded steps; mixed in before the engine's pipeline class."""

    transformer: Any
    vae: Any
    scheduler: Any
    device: torch.device
    od_config: Any

    # the engine's start-up request is 512x512, which small models do not take; read from the registered class only
    dummy_run_num_frames = 0
    supports_request_batch = True

    def forward(self, req: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Draw every request of the engine's batch; a request that fails does not touch its neighbours."""
        extras = [sampling.extra_args for sampling in req.sampling_params_list]
        if not all(REQUEST in extra for extra in extras):
            return super().forward(req)  # type: ignore[misc]  # of the engine's class, which comes after this one
        requests: list[SampleRequest] = [extra[REQUEST] for extra in extras]
        started = time.perf_counter()
        drawn = self._drawer(extras[0][MODEL], extras[0][MODEL_OPTIONS]).draw(requests)
        self.seconds += time.perf_counter() - started
        self.batches[len(requests)] += 1
        self.requests += sum(isinstance(row, dict) for row in drawn)
        return [_failed(row) if isinstance(row, Exception) else _finished(row) for row in drawn]

    def _drawer(self, model: str, options: Mapping[str, Any]) -> BatchDrawer:
        key = json.dumps([model, dict(options)], sort_keys=True)
        if key not in self._drawers:
            self._drawers[key] = BatchDrawer(
                registry.component("model", model).build(registry.options("model", model, options)),
                Encoders(self._parts("tokenizer"), self._parts("text_encoder")),
                self.transformer,
                self.vae,
                scheduler_config=self.scheduler.config,
                decoder_config=self.vae.config,
                device=self.device,
                max_batch=self.od_config.max_num_seqs,
            )
        return self._drawers[key]

    def _parts(self, kind: str) -> dict[str, Any]:
        names = [f"{kind}{number}" for number in _NUMBERED]
        return {name: getattr(self, name) for name in names if getattr(self, name, None) is not None}

    def _start_counting(self) -> None:
        self.requests = 0
        self.batches: Counter[int] = Counter()
        self.seconds = 0.0
        self._drawers: dict[str, BatchDrawer] = {}


class SD3TrajectoryPipeline(TrajectoryPipeline, pipeline_sd3.StableDiffusion3Pipeline):
    """Stable Diffusion 3 and 3.5."""

    def __init__(self, *, od_config: Any, prefix: str = "") -> None:
        super().__init__(od_config=od_config, prefix=prefix)
        self._start_counting()


def post_process_function(od_config: Any) -> Callable[[Any], Any]:
    """Return what turns an output into what the user gets: bytes stay tensors, anything else as the engine does it."""
    stock = pipeline_sd3.get_sd3_image_post_process_func(od_config)

    def post_process(output: Any) -> Any:
        if isinstance(output, torch.Tensor) and output.dtype == torch.uint8:
            return output
        return stock(output)

    return post_process


def _finished(drawn: Drawn) -> DiffusionOutput:
    pixels = drawn.pop("pixels")
    # the engine's trajectory fields have fixed names, but one of them may be a mapping, in every tested version
    return DiffusionOutput(output=pixels, trajectory_latents=drawn)


def _failed(error: Exception) -> DiffusionOutput:
    return DiffusionOutput(error=f"{type(error).__name__}: {error}")
