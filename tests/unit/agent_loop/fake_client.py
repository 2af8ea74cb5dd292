"""A client that answers like a replica's, and the batches that tests send through it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl_omni_core.batches.batch import DataProto
from verl_omni_core.rollout._contract import DiffusionOutput, SampleRequest
from verl_omni_core.settings.run import RunConfig

WINDOW = 2
LATENT = (2, 4, 4)


class Client:
    """Draws everything from the request's seed, so that equal requests give equal samples."""

    def __init__(
        self,
        delay_s: Callable[[SampleRequest], float] = lambda _: 0.0,
        fail: Callable[[SampleRequest], Exception | None] = lambda _: None,
        version: int = 0,
    ) -> None:
        self.delay_s, self.fail, self.version = delay_s, fail, version
        self.requests: list[SampleRequest] = []
        self.route_keys: list[str] = []
        self.attempts: list[int] = []
        self.running = self.most = 0

    async def generate(self, request: SampleRequest, route_key: str, *, attempt: int = 0) -> DiffusionOutput:
        self.requests.append(request)
        self.attempts.append(attempt)
        self.route_keys.append(route_key)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.delay_s(request))
        self.running -= 1
        error = self.fail(request)
        if error is not None:
            raise error
        return draw(request, self.version)


def draw(request: SampleRequest, version: int = 0) -> DiffusionOutput:
    generator = torch.Generator().manual_seed(request.seed)
    encoder = torch.Generator().manual_seed(len(request.prompt))
    steps = 0 if request.sampling.window is None else WINDOW
    embeds = {
        "prompt_embeds": torch.randn(5, 8, generator=encoder).bfloat16(),
        "pooled_prompt_embeds": torch.randn(8, generator=encoder).bfloat16(),
    }
    return DiffusionOutput(
        diffusion_output=torch.randint(0, 256, (3, 16, 16), generator=generator, dtype=torch.uint8),
        log_probs=torch.randn(WINDOW, generator=generator) if request.sampling.logprobs else None,
        num_preempted=0,
        extra_fields={
            **embeds,
            "all_latents": torch.randn(steps + 1, *LATENT, generator=generator),
            "all_timesteps": torch.arange(steps, dtype=torch.float32),
            "step_indices": torch.arange(steps),
            "latents_clean": torch.randn(*LATENT, generator=generator),
            "weights_version": version,
            "replica": "replica-0",
            "generate_s": 0.25,
        },
    )


def config(**groups: dict[str, Any]) -> RunConfig:
    defaults = {"sampler": {"height": 16, "width": 16, "sde_window_size": WINDOW}}
    return RunConfig.model_validate(defaults | groups)


def batch(count: int, *, meta: dict[str, Any] | None = None, **columns: Sequence[Any]) -> DataProto:
    objects = {
        "raw_prompt": [f'the word "W{i // 2}"' for i in range(count)],
        "sample_index": list(range(count)),
        "session": [i % 2 for i in range(count)],
        "sample_id": [f"s{i}" for i in range(count)],
        "uid": [f"u{i // 2}" for i in range(count)],
    }
    return DataProto.from_dict(objects=objects | columns, meta_info={"global_steps": 1} if meta is None else meta)
