"""The reference engine: diffusers' own network in this process, for parity and where vLLM-Omni cannot be installed."""

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import diffusers
import torch

from verl_omni_core import registry
from verl_omni_core.errors import ConfigError, ContractError, DeadlineError, EngineError, VerlOmniError
from verl_omni_core.rollout import _weights
from verl_omni_core.rollout._contract import (
    DiffusionOutput,
    EngineInfo,
    EngineOptions,
    LoadedWeights,
    SampleRequest,
    WeightUpdate,
)
from verl_omni_core.rollout._drawing import BatchDrawer, Drawn, output_of
from verl_omni_core.weights.checksum import checksum

logger = logging.getLogger(__name__)

_ADAPTER = "policy"


@dataclass
class _Waiting:
    request: SampleRequest
    done: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class DiffusersEngine:
    """Batches requests that arrive within ``batch_wait_ms`` of each other; see ``RolloutEngine``."""

    def __init__(self, options: EngineOptions) -> None:
        dtype = getattr(torch, options.dtype)
        self._options = options
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._adapter = registry.component("model", options.model).build(
            registry.options("model", options.model, options.model_options)
        )
        encoders = self._adapter.load_encoders(options.path, dtype)
        for module in encoders.modules.values():
            module.to(self._device)
        self._network = self._adapter.load_denoiser(options.path, dtype).to(self._device).requires_grad_(False)
        decoder = self._adapter.load_decoder(options.path, dtype).to(self._device)
        self._drawer = BatchDrawer(
            self._adapter,
            encoders,
            self._network,
            decoder,
            scheduler_config=self._adapter.scheduler_config(options.path),
            decoder_config=decoder.config,
            device=self._device,
            max_batch=options.max_batch,
        )
        self._version = 0
        self._loads = itertools.count(1)
        self._requests = 0
        self._asleep = False
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._computing = asyncio.Lock()
        self._loop: asyncio.Task | None = None
        self._closed = False

    async def generate(self, request: SampleRequest) -> DiffusionOutput:
        """Draw one sample.

        Raises:
            EngineError: closed or asleep. DeadlineError: no sample within the request timeout. Else what the sample
            failed with.
        """
        self._check_open()
        if self._loop is None:
            self._loop = asyncio.create_task(self._run())
        started = time.perf_counter()
        waiting = _Waiting(request)
        self._queue.put_nowait(waiting)
        try:
            drawn, version = await asyncio.wait_for(waiting.done, self._options.request_timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"request {request.request_id} got no sample within {self._options.request_timeout_s} s; raise "
                "rollout.request_timeout_s or lower rollout.max_batch"
            ) from None
        return output_of(drawn, weights_version=version, generate_s=time.perf_counter() - started)

    async def load_weights(self, update: WeightUpdate) -> LoadedWeights:
        """Load a policy version between two batches.

        Raises:
            ContractError: a tensor without a place of its shape in the network, or one that stands there otherwise than
            it was sent; the weights stay as they were.
        """
        self._check_open()
        _weights.check_update(update)
        async with self._computing:
            load = self._load_lora if update.kind == "lora" else self._load_full
            bound = load(update)
            self._version = update.version
        return LoadedWeights(update.version, bound, checksum(update.tensors))

    async def describe(self) -> EngineInfo:
        """Return name, version and counts."""
        return EngineInfo(
            "diffusers",
            diffusers.__version__,
            self._adapter.facts.pipeline_class,
            self._requests,
            self._options.max_batch,
        )

    async def sleep(self) -> None:
        """Refuse requests until :meth:`wake_up`; on a GPU the network moves to the host."""
        self._check_open()
        async with self._computing:
            self._network.to("cpu")
            self._asleep = True

    async def wake_up(self) -> None:
        """Take requests again."""
        async with self._computing:
            self._network.to(self._device)
            self._asleep = False

    async def close(self) -> None:
        """Fail what is waiting and stop."""
        self._closed = True
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        while not self._queue.empty():
            _fail(self._queue.get_nowait(), EngineError("the engine was closed; start a new one"))

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; start a new one")
        if self._asleep:
            raise EngineError("the engine is asleep; wake it up before it works")

    async def _run(self) -> None:
        batch: list[_Waiting] = []
        try:
            while True:
                batch = [await self._queue.get()]
                await self._fill(batch)
                async with self._computing:
                    version = self._version
                    drawn = await asyncio.to_thread(self._drawer.draw, [waiting.request for waiting in batch])
                for waiting, result in zip(batch, drawn, strict=True):
                    self._finish(waiting, result, version)
                batch = []
        finally:
            for waiting in batch:
                _fail(waiting, EngineError("the engine was closed; start a new one"))

    async def _fill(self, batch: list[_Waiting]) -> None:
        deadline = time.monotonic() + self._options.batch_wait_ms / 1000
        while len(batch) < self._options.max_batch:
            try:
                batch.append(await asyncio.wait_for(self._queue.get(), max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                return

    def _finish(self, waiting: _Waiting, result: Drawn | Exception, version: int) -> None:
        if isinstance(result, VerlOmniError):
            _fail(waiting, result)
        elif isinstance(result, Exception):
            _fail(waiting, EngineError(f"request {waiting.request.request_id} failed: {result!r}"))
        elif not waiting.done.done():
            self._requests += 1
            waiting.done.set_result((result, version))

    def _load_lora(self, update: WeightUpdate) -> int:
        from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict

        modules = _weights.lora_modules(update.tensors)
        names = {name.replace(".base_layer", "") for name, _ in self._network.named_modules()}
        bound = _weights.check_bound(modules, names, "LoRA modules")
        config = LoraConfig(**_weights.peft_fields(update.peft_config, list(modules)))
        state = {_weights.strip_prefix(name): tensor for name, tensor in update.tensors.items()}
        before = list(getattr(self._network, "peft_config", {}))
        name = f"{_ADAPTER}-{next(self._loads)}"
        try:
            self._network.add_adapter(config, adapter_name=name)
            unexpected = set_peft_model_state_dict(self._network, state, adapter_name=name).unexpected_keys
            if unexpected:
                raise ContractError(f"the network has no place for {sorted(unexpected)[:4]}; check model.lora.targets")
            _check_standing(get_peft_model_state_dict(self._network, adapter_name=name), state)
        except Exception as error:
            if name in getattr(self._network, "peft_config", {}):
                self._network.delete_adapters(name)
            if before:
                self._network.set_adapter(before)
            if isinstance(error, VerlOmniError):
                raise
            raise ContractError(f"the adapter does not fit into the network: {error}") from error
        if before:
            self._network.delete_adapters(before)
        self._network.requires_grad_(False)
        return bound

    def _load_full(self, update: WeightUpdate) -> int:
        if getattr(self._network, "peft_config", None):
            raise ContractError("the engine holds an adapter and cannot take full weights; start a new engine")
        own = self._network.state_dict()
        bound = _weights.check_bound(update.tensors, own, "parameters")
        _weights.check_bound([name for name, _ in self._network.named_parameters()], update.tensors, "own parameters")
        wrong = [name for name, tensor in update.tensors.items() if tensor.shape != own[name].shape]
        if wrong:
            raise ContractError(
                f"{wrong[0]} was sent with shape {tuple(update.tensors[wrong[0]].shape)}, the network has "
                f"{tuple(own[wrong[0]].shape)}; send the weights of the engine's model"
            )
        self._network.load_state_dict(dict(update.tensors), strict=False)
        _check_standing(self._network.state_dict(), update.tensors)
        return bound


def _check_standing(standing: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor]) -> None:
    """Compare what stands in the network with what was sent, bit for bit in the network's dtype."""
    for name, tensor in sent.items():
        now = standing.get(name)
        if now is None or not torch.equal(now, tensor.to(now.device, now.dtype)):
            raise ContractError(f"{name} does not stand in the network as it was sent; start a new engine")


def _fail(waiting: _Waiting, error: Exception) -> None:
    if not waiting.done.done():
        waiting.done.set_exception(error)


def check(options: EngineOptions) -> None:
    """Refuse what :func:`build` would refuse, before anything starts.

    Raises:
        ConfigError: ``tensor_parallel`` above 1, which this engine does not have, or any of ``options.options``.
    """
    if options.tensor_parallel != 1:
        raise ConfigError(
            f"rollout.tensor_parallel is {options.tensor_parallel}, but engine 'diffusers' spans one device; use 1 or "
            "engine 'vllm_omni'"
        )
    if options.options:
        raise ConfigError(f"engine 'diffusers' takes no rollout.options, got {sorted(options.options)}; remove them")


async def build(options: EngineOptions) -> DiffusersEngine:
    """Load the pipeline and return the engine.

    Raises:
        ConfigError: as :func:`check`, or a folder that is no pipeline.
    """
    check(options)
    torch.set_num_threads(options.threads)
    return await asyncio.to_thread(DiffusersEngine, options)
