"""An engine in a process of its own, behind calls with deadlines.

vLLM-Omni renames and prefixes the process it runs in, and an engine whose worker died waits for ever: neither belongs
in the test runner.
"""

import asyncio
import multiprocessing
import multiprocessing.connection
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict

from verl_omni_core import registry
from verl_omni_core.models import sd3
from verl_omni_core.rollout._contract import EngineOptions, SamplingParams, WeightUpdate

START_S, CALL_S = 180, 120


@dataclass(frozen=True)
class Pipeline:
    """A folder and what its tests ask it for."""

    folder: str
    prompt: str
    sampling: SamplingParams


class EngineProcess:
    """Use as a context manager; calls return results in order, exceptions included as values in :meth:`each`."""

    def __init__(self, name: str, options: EngineOptions) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(name, options, theirs))
        self.process.start()
        theirs.close()

    def __enter__(self) -> "EngineProcess":
        self._answer(START_S)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self._pipe.send(None)
            self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()

    def each(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        """Call ``method`` with every argument at once."""
        self._pipe.send((method, [(argument,) for argument in arguments]))
        return self._answer(CALL_S)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call ``method`` once; raises what it raised."""
        self._pipe.send((method, [arguments]))
        (result,) = self._answer(CALL_S)
        if isinstance(result, Exception):
            raise result
        return result

    def start_then_close(self, argument: Any, delay_s: float) -> Any:
        """Start a sample, close the engine after ``delay_s`` and return what the sample ended with."""
        self._pipe.send(("start_then_close", [(argument, delay_s)]))
        return self._answer(CALL_S)[0]

    def _answer(self, limit_s: float) -> Any:
        try:
            if self._pipe.poll(limit_s):
                answer = self._pipe.recv()
                if isinstance(answer, Exception):
                    raise answer
                return answer
        except EOFError:
            pass
        self.process.kill()
        raise AssertionError(f"the engine's process died or did not answer within {limit_s} s")


def engine_process(name: str, folder: str, **changes: Any) -> EngineProcess:
    """Return an engine that starts when it is entered; ``changes`` are fields of its options."""
    return EngineProcess(name, engine_options(folder, **changes))


def engine_options(folder: str, **changes: Any) -> EngineOptions:
    """Return options for one thread and batches of 8, with ``changes``."""
    values = dict(model="sd3", path=folder, dtype="float32", max_batch=8, batch_wait_ms=50.0, threads=1,
                  tensor_parallel=1, lora_rank=4, deterministic=False, start_timeout_s=170.0, request_timeout_s=60.0,
                  )  # fmt: skip
    return EngineOptions(**values | changes)


def adapter_update(pipeline: Pipeline, version: int, spread: float = 0.1) -> WeightUpdate:
    """Return a random adapter of every kind of layer, from ``version`` as its seed."""
    network = sd3.build(None).load_denoiser(pipeline.folder, torch.float32)
    targets = [*sd3.SD3Adapter.facts.lora_targets, "ff.net.0.proj", "ff.net.2"]
    network.add_adapter(LoraConfig(r=4, lora_alpha=12, target_modules=targets))
    generator = torch.Generator().manual_seed(version)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) * spread
        for name, tensor in get_peft_model_state_dict(network).items()
    }
    return WeightUpdate(version, "lora", tensors, {"r": 4, "lora_alpha": 12, "target_modules": targets})


def _serve(name: str, options: EngineOptions, pipe: multiprocessing.connection.Connection) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(_main(name, options, pipe))


def _receive(pipe: multiprocessing.connection.Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        os._exit(1)  # the test runner is gone, and the engine's threads would keep this process for ever


async def _main(name: str, options: EngineOptions, pipe: multiprocessing.connection.Connection) -> None:
    try:
        engine = await registry.component("engine", name).build(options)
    except Exception as error:
        pipe.send(error)
        raise
    pipe.send("started")
    while (command := await asyncio.to_thread(_receive, pipe)) is not None:
        method, calls = command
        if method == "start_then_close":
            results = [await _start_then_close(engine, *calls[0])]
        else:
            work = [getattr(engine, method)(*arguments) for arguments in calls]
            results = await asyncio.gather(*work, return_exceptions=True)
        pipe.send(list(results))
    await engine.close()


async def _start_then_close(engine: Any, request: Any, delay_s: float) -> Any:
    sample = asyncio.create_task(engine.generate(request))
    await asyncio.sleep(delay_s)
    await engine.close()
    return (await asyncio.gather(sample, return_exceptions=True))[0]
