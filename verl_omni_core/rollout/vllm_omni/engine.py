"""The rollout engine over ``AsyncOmni``, in the process that calls it."""

import asyncio
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from verl_omni_core import errors
from verl_omni_core.errors import ConfigError, ContractError, DeadlineError, EngineError, VerlOmniError
from verl_omni_core.given_files import json_object
from verl_omni_core.rollout import _weights
from verl_omni_core.rollout._contract import (
    DiffusionOutput,
    EngineInfo,
    EngineOptions,
    LoadedWeights,
    SampleRequest,
    WeightUpdate,
)
from verl_omni_core.rollout._drawing import output_of
from verl_omni_core.rollout.vllm_omni import compat
from verl_omni_core.rollout.vllm_omni.plugins import PIPELINES
from verl_omni_core.weights.checksum import checksum

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 60
_EXTENSION = "verl_omni_core.rollout.vllm_omni.extension.RolloutWorkerExtension"
_OURS = ("model", "dtype", "max_num_seqs", "request_batch_max_wait_ms", "tensor_parallel_size", "worker_extension_cls")


class VLLMOmniEngine:
    """See :class:`verl_omni_core.rollout._contract.RolloutEngine`.

    Loading weights waits until every sample in flight is done and holds new ones back meanwhile, so each sample comes
    from one version.
    """

    def __init__(self, omni: Any, options: EngineOptions, version: str, max_batch: int) -> None:
        self._omni = omni
        self._options = options
        self._engine_version = version
        self._max_batch = max_batch
        self._numbers = itertools.count()
        self._loads = itertools.count(1)
        self._lora: Any = None
        self._loaded = LoadedWeights(0, 0, "")
        self._broken: str | None = None
        self._asleep = False
        self._in_flight = 0
        self._changing = False
        self._turn = asyncio.Condition()
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def generate(self, request: SampleRequest) -> DiffusionOutput:
        """Draw one sample.

        Raises:
            EngineError: the engine stopped, sleeps or failed. DeadlineError: no sample within the request timeout.
            ConfigError, ContractError, NumericError: this sample cannot be drawn; others go on.
        """
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self._options.request_timeout_s), self._drawing():
                version = self._loaded.version
                output = await self._until_stopped(self._sample(request))
        except DeadlineError:
            raise
        except TimeoutError:
            raise DeadlineError(
                f"request {request.request_id} got no sample within {self._options.request_timeout_s} s; raise "
                "rollout.request_timeout_s or lower rollout.max_batch"
            ) from None
        drawn = {"pixels": output.images[0], **output.trajectory_latents}
        return output_of(drawn, weights_version=version, generate_s=time.perf_counter() - started)

    async def load_weights(self, update: WeightUpdate) -> LoadedWeights:
        """Load a policy version into every rank; the same update again changes nothing.

        A load that fails may have changed some of the weights, on some ranks: from then on the engine takes no request,
        and no version counts as loaded, until a load succeeds.

        Raises:
            ContractError: nothing or too little was bound, or ranks disagree.
            EngineError: the engine stopped or failed. DeadlineError: samples in flight or the load took too long.
        """
        _weights.check_update(update)
        sent = checksum(update.tensors)
        if self._broken is None and (self._loaded.version, self._loaded.checksum) == (update.version, sent):
            return self._loaded
        async with self._alone():
            self._broken = f"loading version {update.version} did not succeed"
            if update.kind == "lora":
                loaded, lora = await self._load_lora(update)
            else:
                loaded, lora = await self._rpc("load_full_tensors", dict(update.tensors)), None
            if loaded["checksum"] != sent:
                raise ContractError(
                    f"sent weights with checksum {sent}, the engine holds {loaded['checksum']}; restart it"
                )
            self._broken, self._lora = None, lora
            self._loaded = LoadedWeights(update.version, loaded["bound"], loaded["checksum"])
        return self._loaded

    async def describe(self) -> EngineInfo:
        """Return name, version and the pipeline's own count of finished requests."""
        own = await self._rpc("describe_rollout")
        return EngineInfo("vllm_omni", self._engine_version, own["pipeline_class"], own["requests"], self._max_batch)

    async def statistics(self) -> dict[str, Any]:
        """Return the pipeline's counts: ``batches`` (size to count), ``forward_s``, ``threads``."""
        return await self._rpc("describe_rollout")

    async def standing_checksum(self) -> str:
        """Return the checksum of the first rank's parameters and adapter buffers as they stand."""
        return (await self._rpc("checksum_of_network"))["checksum"]

    async def sleep(self) -> None:
        """Set the weights aside after the samples in flight; requests are refused until :meth:`wake_up`."""
        async with self._alone():
            self._asleep = True
            _check_acknowledged("sleep", await self._until_stopped(self._omni.sleep(level=1)))

    async def wake_up(self) -> None:
        """Put the weights back and take requests again."""
        async with self._alone(awake=False):
            _check_acknowledged("wake up", await self._until_stopped(self._omni.wake_up()))
            self._asleep = False

    async def close(self) -> None:
        """Stop the engine; samples in flight fail."""
        if not self._stopped.done():
            self._stopped.set_result(None)
            await asyncio.sleep(0)  # lets the waiting samples notice before the engine goes away under them
            try:
                await asyncio.wait_for(asyncio.to_thread(self._omni.shutdown), _SHUTDOWN_S)
            except TimeoutError:
                raise DeadlineError(f"the engine did not stop within {_SHUTDOWN_S} s; end its process") from None

    async def _sample(self, request: SampleRequest) -> Any:
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        from verl_omni_core.rollout.vllm_omni.pipeline import MODEL, MODEL_OPTIONS, REQUEST

        sampling = request.sampling
        params = OmniDiffusionSamplingParams(
            height=sampling.height,
            width=sampling.width,
            num_inference_steps=sampling.num_inference_steps,
            guidance_scale=sampling.guidance_scale,
            max_sequence_length=sampling.max_sequence_length,
            seed=request.seed,
            extra_args={
                REQUEST: request,
                MODEL: self._options.model,
                MODEL_OPTIONS: dict(self._options.model_options),
            },
            lora_request=self._lora,
        )
        last = None
        # the engine's id has a number of its own: a retry may come while the first attempt is still being torn down
        request_id = f"{request.request_id}-{next(self._numbers)}"
        try:
            async for output in self._omni.generate(
                {"prompt": request.prompt}, sampling_params_list=[params], request_id=request_id
            ):
                last = output
        except VerlOmniError:
            raise
        except Exception as error:
            raise _typed(request.request_id, error) from error
        if last is None or not last.images or not isinstance(last.trajectory_latents, Mapping):
            raise EngineError(f"request {request.request_id} came back without a sample; the engine may have stopped")
        return last

    async def _load_lora(self, update: WeightUpdate) -> tuple[dict[str, Any], Any]:
        from verl_omni_core.rollout.vllm_omni.lora_request import policy_request

        request = policy_request(update.version, next(self._loads), update.tensors, update.peft_config)
        return await self._rpc("load_lora_tensors", request), request.reference()

    async def _rpc(self, method: str, *args: Any) -> dict[str, Any]:
        """Return the first rank's answer; raise what any rank refused with."""
        call = self._omni.collective_rpc(method=method, args=args, timeout=self._options.request_timeout_s)
        try:
            replies = await asyncio.wait_for(self._until_stopped(call), self._options.request_timeout_s)
        except TimeoutError:
            raise DeadlineError(
                f"the engine did not answer {method} within {self._options.request_timeout_s} s"
            ) from None
        except VerlOmniError:
            raise
        except Exception as error:
            raise EngineError(f"{method} failed in the engine: {error!r}") from error
        ranks = list(_answers(replies))
        if not ranks:
            raise EngineError(f"{method} got no usable answer from the engine: {replies!r}")
        for rank in ranks:
            if "error" in rank:
                raise getattr(errors, rank.get("error_class", ""), EngineError)(rank["error"])
        return ranks[0]

    async def _until_stopped(self, work: Awaitable[Any]) -> Any:
        """Await ``work``, but not longer than the engine lives: a stopped engine answers nothing, for ever."""
        if self._stopped.done():
            if asyncio.iscoroutine(work):
                work.close()
            raise EngineError("the engine was stopped; start a new one")
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._stopped}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise EngineError("the engine was stopped; start a new one")
        finally:
            task.cancel()

    @asynccontextmanager
    async def _drawing(self) -> AsyncIterator[None]:
        async with self._turn:
            await self._turn.wait_for(lambda: not self._changing)
            if self._asleep:
                raise EngineError("the engine is asleep; wake it up first")
            if self._broken is not None:
                raise EngineError(f"the engine takes no request: {self._broken}; load weights again or restart it")
            self._in_flight += 1
        try:
            yield
        finally:
            async with self._turn:
                self._in_flight -= 1
                self._turn.notify_all()

    @asynccontextmanager
    async def _alone(self, *, awake: bool = True) -> AsyncIterator[None]:
        limit_s = self._options.request_timeout_s
        changing = False
        try:
            try:
                async with asyncio.timeout(limit_s), self._turn:
                    await self._turn.wait_for(lambda: not self._changing)
                    if awake and self._asleep:
                        raise EngineError("the engine is asleep; wake it up first")
                    changing = self._changing = True
                    await self._turn.wait_for(lambda: self._in_flight == 0)
            except TimeoutError:
                raise DeadlineError(
                    f"{self._in_flight} samples were still in flight after {limit_s} s; raise rollout.request_timeout_s"
                ) from None
            yield
        finally:
            if changing:
                async with self._turn:
                    self._changing = False
                    self._turn.notify_all()


async def start(options: EngineOptions) -> VLLMOmniEngine:
    """Start the engine; see :func:`verl_omni_core.rollout.vllm_omni.build`."""
    version = compat.installed_version()
    arguments = engine_arguments(options)
    torch.set_num_threads(options.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a pipeline folder is complete; the engine would ask the hub anyway
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from verl_omni_core.rollout.vllm_omni import plugins

    plugins.register_pipelines()
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    try:
        omni = await asyncio.wait_for(asyncio.to_thread(AsyncOmni, **arguments), options.start_timeout_s)
    except TimeoutError:
        raise DeadlineError(
            f"vLLM-Omni did not start within {options.start_timeout_s} s; raise rollout.start_timeout_s"
        ) from None
    except Exception as error:
        raise EngineError(f"vLLM-Omni {version} did not start on {options.path!r}: {error!r}") from error
    engine = VLLMOmniEngine(omni, options, version, arguments["max_num_seqs"])
    await engine._rpc("configure_rollout", options.threads)
    return engine


def check_options(options: EngineOptions) -> str:
    """Return the architecture of the pipeline folder.

    Raises:
        ConfigError: an architecture without a pipeline of ours, or an option that another setting decides.
    """
    clash = sorted(set(options.options) & set(_OURS))
    if clash:
        raise ConfigError(
            f"rollout.options may not set {clash}; use model.path, rollout.dtype, rollout.max_batch, "
            "rollout.batch_wait_ms and rollout.tensor_parallel"
        )
    architecture = _architecture(options.path)
    if architecture not in PIPELINES:
        raise ConfigError(
            f"model.path {options.path!r} holds a {architecture}, for which there is no vLLM-Omni pipeline; use one of "
            f"{', '.join(PIPELINES)} or rollout.name = 'diffusers'"
        )
    return architecture


def engine_arguments(options: EngineOptions) -> dict[str, Any]:
    """Return the keyword arguments of ``AsyncOmni``; raises as :func:`check_options`."""
    architecture = check_options(options)
    return {
        "model": options.path,
        "dtype": options.dtype,
        "enforce_eager": True,
        "max_num_seqs": clamped_batch(architecture, options.max_batch),
        "request_batch_max_wait_ms": options.batch_wait_ms,
        "tensor_parallel_size": options.tensor_parallel,
        "worker_extension_cls": _EXTENSION,
        "enable_sleep_mode": True,
        **options.options,
    }


def clamped_batch(architecture: str, max_batch: int) -> int:
    """Return the batch limit that the architecture's pipeline takes: 1 where it does not batch requests, and say so."""
    from verl_omni_core.rollout.vllm_omni import pipeline

    if getattr(getattr(pipeline, PIPELINES[architecture]), "supports_request_batch", False) or max_batch == 1:
        return max_batch
    logger.warning("rollout.max_batch is %d, but %s runs one request at a time; using 1", max_batch, architecture)
    return 1


def _architecture(path: str) -> str:
    try:
        return json_object(Path(path, "model_index.json"))["_class_name"]
    except ConfigError as error:
        raise ConfigError(f"model.path: {error}") from error
    except (OSError, KeyError) as error:
        raise ConfigError(
            f"model.path {path!r} is no pipeline folder ({error!r}); give one in diffusers format"
        ) from None


def _typed(request_id: str, error: Exception) -> VerlOmniError:
    """Return the error of ours that the engine's message names, or an EngineError."""
    message = str(error)
    name, _, rest = message.partition(": ")
    kind = getattr(errors, name.rpartition(" ")[2], None)
    if isinstance(kind, type) and issubclass(kind, VerlOmniError):
        return kind(f"request {request_id}: {rest}")
    return EngineError(f"request {request_id} failed in the engine: {message or repr(error)}")


def _answers(replies: Any) -> Any:
    # one list per stage of one answer per rank, but not in every executor
    if isinstance(replies, dict):
        yield replies
    elif isinstance(replies, list | tuple):
        for reply in replies:
            yield from _answers(reply)


def _check_acknowledged(what: str, acknowledgements: Any) -> None:
    failed = [each for each in acknowledgements if each is not None and getattr(each, "status", "SUCCESS") != "SUCCESS"]
    if failed:
        raise EngineError(f"the engine did not {what}: {failed}; start it again")
