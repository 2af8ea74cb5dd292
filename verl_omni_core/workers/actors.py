"""The live actors of a run: named, detached, in a namespace of their own, so that any later process finds them."""

import os
from dataclasses import dataclass
from typing import Any

import ray

from verl_omni_core.cluster import ray_head
from verl_omni_core.errors import DeadlineError, StageLost
from verl_omni_core.rollout._contract import EngineInfo, EngineOptions
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.workers.actor_rollout_ref import ActorRolloutRefWorker
from verl_omni_core.workers.replica import vLLMOmniReplica
from verl_omni_core.workers.reward_worker import RewardWorker
from verl_omni_core.workers.rollout_worker import RolloutWorker
from verl_omni_core.workers.train_group import TrainGroup

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass
class Actors:
    """Handles of everything that lives in a run's namespace."""

    namespace: str
    trainer: TrainGroup
    replicas: list[Any]
    rollout_workers: list[Any]
    reward_workers: list[Any]
    engines: list[EngineInfo]


def namespace_of(run_id: str) -> str:
    """Return the Ray namespace of a run."""
    return f"verl-omni-{run_id}"


def thread_environment(threads: int) -> dict[str, str]:
    """Return the variables that must stand before a process first imports numpy or torch."""
    return {name: str(threads) for name in THREAD_VARIABLES}


def get(reference: Any, timeout_s: float, what: str) -> Any:
    """Wait for a Ray result.

    Raises:
        DeadlineError: it took longer than ``timeout_s``. StageLost: an actor died. Else the actor's own error.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise DeadlineError(f"{what} took longer than {timeout_s:.0f} s; the actor may hang, see its log") from None
    except ray.exceptions.RayActorError as error:
        raise StageLost(f"{what}: an actor died ({error}); start the run again, it goes on from what is stored") from error
    except ray.exceptions.RayTaskError as error:
        raise error.as_instanceof_cause() from None
