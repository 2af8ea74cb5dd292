"""Samples for a list of requests, from a model adapter and the parts of a loaded pipeline.

Every engine draws here, so that grouping, seeds, padding and recorded fields mean the same in all of them; an engine
brings the network and decides which requests arrive together.

Axes: ``B`` rows of one forward pass, ``C H W`` pixels, ``W`` stochastic steps, ``X`` latent axes.
"""

import json
import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_omni_core import registry
from verl_omni_core.errors import NumericError, VerlOmniError
from verl_omni_core.models._contract import DenoiserAdapter, Encoders
from verl_omni_core.models._guidance import negative_prompt_for
from verl_omni_core.rollout._contract import DiffusionOutput, SampleRequest, SamplingParams
from verl_omni_core.samplers._denoise import Trajectory, denoise

logger = logging.getLogger(__name__)

_CACHE_BYTES = 64 * 2**20
_PIXELS, _LOG_PROBS = "pixels", "log_probs"

Drawn = dict[str, Tensor]
"""What one sample consists of: ``pixels`` uint8 [C, H, W], ``log_probs`` fp32 [W] unless deterministic, and the
``extra_fields`` of :class:`verl_omni_core.rollout._contract.DiffusionOutput` that are tensors."""


@dataclass(frozen=True)
class Batch:
    """One forward pass: a request for each row, and whose it is (none: a copy that only fills the shape)."""

    rows: tuple[SampleRequest, ...]
    owners: tuple[int | None, ...]


def plan_batches(requests: Sequence[SampleRequest], max_batch: int) -> list[Batch]:
    """Group requests into forward passes; rows of one pass have equal sampling parameters.

    A request with a place in a pack is computed at that place of a batch of fixed shape, so its bits do not depend on
    which other requests arrived with it; the shape is the pack's size, or ``max_batch`` where that is smaller, and
    empty places hold copies.
    """
    groups: dict[tuple[Hashable, int | None], list[int]] = {}
    for index, request in enumerate(requests):
        size = None if request.pack is None else request.pack.size
        groups.setdefault((_sampling_key(request.sampling), size), []).append(index)
    batches = []
    for (_, pack_size), members in groups.items():
        if pack_size is None:
            for start in range(0, len(members), max_batch):
                chunk = members[start : start + max_batch]
                batches.append(Batch(tuple(requests[index] for index in chunk), tuple(chunk)))
        else:
            places = {index: pack.index for index in members if (pack := requests[index].pack) is not None}
            batches.extend(_fixed_batches(requests, places, min(pack_size, max_batch)))
    return batches


def _fixed_batches(requests: Sequence[SampleRequest], places: Mapping[int, int], shape: int) -> list[Batch]:
    placed: list[list[int | None]] = []
    for index, place in places.items():
        free = next((owners for owners in placed if owners[place % shape] is None), None)
        if free is None:
            free = [None] * shape
            placed.append(free)
        free[place % shape] = index
    batches = []
    for owners in placed:
        filler = next(index for index in owners if index is not None)
        rows = tuple(requests[filler if owner is None else owner] for owner in owners)
        batches.append(Batch(rows, tuple(owners)))
    return batches


def _sampling_key(sampling: SamplingParams) -> Hashable:
    options = json.dumps(dict(sampling.sampler_options), sort_keys=True, default=str)
    return (
        (sampling.height, sampling.width, sampling.num_inference_steps, sampling.max_sequence_length),
        (sampling.sampler, options, sampling.grid, sampling.noise_level, sampling.window),
        (sampling.guidance_scale, sampling.logprobs),
    )


class BatchDrawer:
    """Draws samples with one loaded pipeline; keeps the encodings of recent prompts, at most 64 MiB of them."""

    def __init__(
        self,
        adapter: DenoiserAdapter,
        encoders: Encoders,
        denoiser: Any,
        decoder: torch.nn.Module,
        *,
        scheduler_config: Mapping[str, Any],
        decoder_config: Mapping[str, Any],
        device: torch.device,
        max_batch: int,
    ) -> None:
        self.adapter = adapter
        self.encoders = encoders
        self.denoiser = denoiser
        self.decoder = decoder
        self.scheduler_config = scheduler_config
        self.decoder_config = decoder_config
        self.device = device
        self.max_batch = max_batch
        self._encoded: OrderedDict[tuple[str, str | None, int], dict[str, Tensor]] = OrderedDict()
        self._encoded_bytes = 0

    def draw(self, requests: Sequence[SampleRequest]) -> list[Drawn | Exception]:
        """Return a sample for each request, in their order; a request that fails is its exception, others go on."""
        results: dict[int, Drawn | Exception] = {}
        for batch in plan_batches(requests, self.max_batch):
            rows: Sequence[Drawn | Exception]
            try:
                rows = self._draw_batch(batch.rows)
            except Exception as error:
                # the caller gets the error; what it was not written for deserves its traceback as well
                logger.error(
                    "a batch of %d rows failed", len(batch.rows), exc_info=not isinstance(error, VerlOmniError)
                )
                rows = [error] * len(batch.rows)
            results |= {owner: row for owner, row in zip(batch.owners, rows, strict=True) if owner is not None}
        return [results[index] for index in range(len(requests))]

    @torch.no_grad()
    def _draw_batch(self, rows: Sequence[SampleRequest]) -> list[Drawn | Exception]:
        sampling = rows[0].sampling
        geometry = self.adapter.geometry(sampling.height, sampling.width, self.decoder_config)
        schedule = self.adapter.schedule(geometry, sampling.num_inference_steps, self.scheduler_config, sampling.grid)
        encoded = [self._encode(row) for row in rows]
        conditioning = {name: torch.stack([one[name] for one in encoded]).to(self.device) for name in encoded[0]}
        # on the CPU whatever the device: a seed then means the same sample everywhere
        generators = [torch.Generator().manual_seed(row.seed) for row in rows]
        trajectory = denoise(
            lambda latents, timestep, _: self.adapter.velocity(
                self.denoiser, latents, timestep, conditioning, sampling.guidance_scale
            ),
            self.adapter.initial_latents(geometry, generators).to(self.device),
            schedule,
            registry.component("sampler", sampling.sampler),
            dict(sampling.sampler_options),
            noise_level=sampling.noise_level,
            window=sampling.window,
            generators=generators,
        )
        finite = torch.isfinite(trajectory.latents_clean).flatten(1).all(dim=1)
        clean = torch.where(finite.view(-1, *(1,) * (trajectory.latents_clean.ndim - 1)), trajectory.latents_clean, 0)
        pixels = self.adapter.decode(self.decoder, clean)
        return [
            _row(trajectory, pixels, encoded[index], sampling, index) if finite[index] else _not_finite(row)
            for index, row in enumerate(rows)
        ]

    def _encode(self, row: SampleRequest) -> dict[str, Tensor]:
        """Encode a prompt alone, whatever it shares a batch with: its bits must not depend on its neighbours."""
        negative = negative_prompt_for(row.negative_prompt, row.sampling.guidance_scale)
        key = (row.prompt, negative, row.sampling.max_sequence_length)
        if key in self._encoded:
            self._encoded.move_to_end(key)
            return self._encoded[key]
        encoded = dict(self.adapter.encode(self.encoders, *key))
        self._encoded[key] = encoded
        self._encoded_bytes += _size_bytes(encoded)
        while self._encoded_bytes > _CACHE_BYTES and len(self._encoded) > 1:
            self._encoded_bytes -= _size_bytes(self._encoded.popitem(last=False)[1])
        return encoded


def output_of(drawn: Drawn, *, weights_version: int, generate_s: float) -> DiffusionOutput:
    """Return what a replica returns for one sample. Its tensors are copies: a row is a view of its whole batch, which
    would travel and stay alive with it."""
    own = {name: tensor.detach().to("cpu", copy=True) for name, tensor in drawn.items()}
    pixels, log_probs = own.pop(_PIXELS), own.pop(_LOG_PROBS, None)
    return DiffusionOutput(
        diffusion_output=pixels,
        log_probs=log_probs,
        num_preempted=0,
        extra_fields={**own, "weights_version": weights_version, "replica": "", "generate_s": generate_s},
    )


def _row(
    trajectory: Trajectory, pixels: Tensor, encoded: Mapping[str, Tensor], sampling: SamplingParams, index: int
) -> Drawn:
    drawn = {
        _PIXELS: pixels[index],
        "all_latents": trajectory.all_latents[index],
        "all_timesteps": trajectory.all_timesteps[index],
        "step_indices": trajectory.step_indices,
        "latents_clean": trajectory.latents_clean[index],
        **encoded,
    }
    if sampling.window is not None and sampling.logprobs:
        drawn[_LOG_PROBS] = trajectory.log_probs[index]
    return drawn


def _not_finite(row: SampleRequest) -> NumericError:
    return NumericError(
        f"request {row.request_id} (seed {row.seed}) ended in latents that are not finite; lower "
        "training.learning_rate or sampler.noise_level, or compute in float32"
    )


def _size_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
