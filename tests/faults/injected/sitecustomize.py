"""Asks, at some points of the actors' code, whether a fault is planned there.

Python imports this module as an interpreter starts whose path has this folder, which is how it gets into processes that
Ray starts. The product knows nothing of it: its functions are wrapped as their modules are imported.
"""

import asyncio
import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tests.faults.injected import planned

_FOREVER_S = 3600.0


def _step_of(name: str) -> int | None:
    """Return the step in a sample's id, ``s000002-r...``; none for other names."""
    return int(name[1:7]) if name[:1] == "s" and name[1:7].isdigit() else None


def _trainer(module: ModuleType) -> None:
    worker, engine = module.ActorRolloutRefWorker, module.PPODiffusersFSDPEngine
    facts: dict[str, Any] = {}
    update_actor, passes, step = worker.update_actor, engine.forward_backward_batch, engine.optimizer_step

    @functools.wraps(update_actor)
    def updating(self: Any, command: Any) -> Any:
        facts.update(rank=self._rank, step=command.step)
        return update_actor(self, command)

    @functools.wraps(passes)
    def passing(self: Any, *arguments: Any, **named: Any) -> Any:
        result = passes(self, *arguments, **named)
        planned.due("rank.before_vote", **facts)
        return result

    @functools.wraps(step)
    def stepping(self: Any) -> Any:
        planned.due("rank.before_step", **facts)
        result = step(self)
        planned.due("rank.after_step", **facts)
        return result

    worker.update_actor, engine.forward_backward_batch, engine.optimizer_step = updating, passing, stepping


def _replica(module: ModuleType) -> None:
    replica = module.vLLMOmniReplica
    generate, load_weights = replica.generate, replica.load_weights

    @functools.wraps(generate)
    async def generating(self: Any, request: Any) -> Any:
        planned.due("replica.generate", step=_step_of(request.request_id), replica=self._name)
        return await generate(self, request)

    @functools.wraps(load_weights)
    async def loading(self: Any, update: Any, version: int | None = None) -> Any:
        if planned.due("replica.load_weights", version=version, replica=self._name) == "hang":
            await asyncio.sleep(_FOREVER_S)
        return await load_weights(self, update, version)

    replica.generate, replica.load_weights = generating, loading


def _rollout_worker(module: ModuleType) -> None:
    worker = module.RolloutWorker
    run_pack = worker.run_pack

    @functools.wraps(run_pack)
    async def running(self: Any, pack: Any) -> Any:
        facts = {"step": pack.attempt.step, "stage": pack.attempt.stage, "shard": pack.shard}
        if planned.due("pack", **facts) == "hang":
            await asyncio.sleep(_FOREVER_S)
        return await run_pack(self, pack)

    worker.run_pack = running


def _reward_worker(module: ModuleType) -> None:
    worker = module.RewardWorker
    score = worker.score

    @functools.wraps(score)
    async def scoring(self: Any, items: Any) -> Any:
        planned.due("reward_worker.score", step=_step_of(items[0].sample_id))
        return await score(self, items)

    worker.score = scoring


_WRAPPED: dict[str, Callable[[ModuleType], None]] = {
    "verl_omni_core.workers.actor_rollout_ref": _trainer,
    "verl_omni_core.workers.replica": _replica,
    "verl_omni_core.workers.rollout_worker": _rollout_worker,
    "verl_omni_core.workers.reward_worker": _reward_worker,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        wrap = _WRAPPED.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if wrap else None
        if wrap is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            wrap(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
