"""One engine in a Ray actor."""

import asyncio
import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

from verl_omni_core import registry
from verl_omni_core.errors import EngineError
from verl_omni_core.rollout._contract import (
    DiffusionOutput,
    EngineInfo,
    EngineOptions,
    LoadedWeights,
    RolloutEngine,
    SampleRequest,
    WeightUpdate,
)
from verl_omni_core.weights.filesystem import read_update
from verl_omni_core.workers.pack_gate import PackGate

_CONCURRENCY = 4096  # requests wait inside the engine, where they can share a batch, never in front of the actor


class vLLMOmniReplica:  # noqa: N801  the founding documents' name
    """Boots one engine and forwards generation, weight updates, sleep and resume to it.

    The engine is a component by name, so the reference engine runs in the same actor. Methods raise what the engine
    raises; on the caller's side :class:`verl_omni_core.workers.router.ReplicaRouter` turns Ray's wrapping back.
    """

    def __init__(self, name: str, engine: str = "vllm_omni") -> None:
        self._name = name
        self._component = engine
        self._engine: RolloutEngine | None = None
        self._instance = ""
        self._version = 0
        self._starting = asyncio.Lock()
        self._gate = PackGate()

    async def start(self, options: EngineOptions) -> EngineInfo:
        """Start the engine and return what it is; a second call returns the same without starting another.

        Raises:
            ConfigError, EngineError, DeadlineError: as the engine's ``build``.
        """
        async with self._starting:
            if self._engine is None:
                os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of processes that the engine starts
                torch.set_num_threads(options.threads)
                self._engine = await registry.component("engine", self._component).build(options)
                self._instance = uuid.uuid4().hex[:12]
        return await self.describe()

    async def generate(self, request: SampleRequest) -> DiffusionOutput:
        """Draw one sample; its ``replica`` field names this actor."""
        await self._gate.enter(request)
        output = await self._running().generate(request)
        return replace(output, extra_fields={**output.extra_fields, "replica": self._name})

    async def load_weights(self, update: WeightUpdate | str | Path, version: int | None = None) -> LoadedWeights:
        """Load a policy version, from memory or from a folder as ``weights.filesystem`` writes it.

        Args:
            version: of the folder; updates in memory carry their own.
        """
        if not isinstance(update, WeightUpdate):
            if version is None:
                raise EngineError(f"weights from {str(update)!r} need a version; give the policy version")
            update = await asyncio.to_thread(read_update, update, version)
        loaded = await self._running().load_weights(update)
        self._version = loaded.version
        return loaded

    async def describe(self) -> EngineInfo:
        """Return the engine's name, version, pipeline and own count of finished requests."""
        return replace(await self._running().describe(), instance=self._instance)

    async def statistics(self) -> dict[str, Any]:
        """Return what else the engine counts, such as ``batches`` (size to count); empty where it counts nothing."""
        engine: Any = self._running()
        return await engine.statistics() if hasattr(engine, "statistics") else {}

    async def sleep(self) -> None:
        """Set the weights aside after the samples in flight."""
        await self._running().sleep()

    async def wake_up(self) -> None:
        """Put the weights back."""
        await self._running().wake_up()

    async def ping(self) -> dict[str, Any]:
        """Return name, process id, whether the engine runs, and the policy version that it holds."""
        return {"name": self._name, "pid": os.getpid(), "running": self._engine is not None, "version": self._version}

    async def close(self) -> None:
        """Stop the engine; samples in flight fail. The actor stays and can start another."""
        engine, self._engine, self._version = self._engine, None, 0
        if engine is not None:
            await engine.close()

    def _running(self) -> RolloutEngine:
        if self._engine is None:
            raise EngineError(f"replica {self._name} runs no engine; call start first")
        return self._engine


def create_replica(name: str, engine: str = "vllm_omni", /, **actor_options: Any) -> ActorHandle:
    """Create the actor, without starting its engine.

    Args:
        name: the replica's name, as samples carry it.
        actor_options: Ray's, such as ``name``, ``namespace``, ``lifetime``, ``num_cpus``, ``num_gpus``.
    """
    defaults = {"num_cpus": 1, "max_concurrency": _CONCURRENCY, "max_restarts": 0}
    return ray.remote(vLLMOmniReplica).options(**defaults | actor_options).remote(name, engine)
