"""The trainer's ranks as the driver sees them: one call reaches all of them, and every wait ends.

Ranks that answer differently cannot go on together. If one died, or hangs while another failed, the group is ended: a
fresh one starts from the last checkpoint.
"""

import time
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

from verl_omni_core.errors import ContractError, DeadlineError, EngineError, StageLost
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store.manifest import FileRecord
from verl_omni_core.workers.actor_rollout_ref import CONTROL, ActorRolloutRefWorker
from verl_omni_core.workers.commands import (
    InferCommand,
    ProbeCommand,
    RankState,
    UpdateCommand,
    UpdateResult,
    WrittenWeights,
)
from verl_omni_core.workers.threads import environment

_SLICE_S = 2.0
_GRACE_S = 15.0
_PING_S = 30.0


class TrainGroup:
    """All ranks of a run's trainer. Any process that finds the actors can make one."""

    def __init__(self, config: RunConfig, handles: Sequence[ActorHandle], epoch: int | None = None) -> None:
        self.config = config
        self.handles = list(handles)
        self.epoch = epoch
        """Fence epoch of who commands through this object; none: of somebody who needs none, as in a notebook."""

    @classmethod
    def start(
        cls, config: RunConfig, namespace: str, *, epoch: int | None = None, num_gpus: float = 0, **actor_options: Any
    ) -> "TrainGroup":
        """Create the ranks that do not live yet, named and detached; :meth:`wait_until_ready` completes the start.

        Args:
            epoch: fence epoch of the owner.
            num_gpus: of each rank.
            actor_options: further options of Ray's, such as a placement group.
        """
        # a rank computes one command at a time and answers pings meanwhile
        actor = ray.remote(concurrency_groups={CONTROL: 1})(ActorRolloutRefWorker)
        handles = []
        for rank in range(config.training.ranks):
            options = {
                "name": _name(rank),
                "namespace": namespace,
                "lifetime": "detached",
                "get_if_exists": True,
                "max_restarts": 0,
                "num_cpus": 0,
                "num_gpus": num_gpus,
                "runtime_env": {"env_vars": environment(config.training.threads)},
            }
            handles.append(actor.options(**options | actor_options).remote(config, rank, config.training.ranks))
        return cls(config, handles, epoch)

    @classmethod
    def find(cls, config: RunConfig, namespace: str, *, epoch: int | None = None) -> "TrainGroup":
        """Return the group whose ranks live in ``namespace``.

        Raises:
            StageLost: a rank does not live.
        """
        handles = []
        for rank in range(config.training.ranks):
            try:
                handles.append(ray.get_actor(_name(rank), namespace=namespace))
            except ValueError:
                raise StageLost(
                    f"{_name(rank)} of {namespace} does not live; start the run again to rebuild it"
                ) from None
        return cls(config, handles, epoch)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Let the ranks meet and build their networks; quick if they have.

        Raises:
            DeadlineError: not within ``timeout_s``. StageLost: a rank died, or some ranks are new beside old ones.
        """
        states: list[RankState] = self._all("ping", timeout_s=timeout_s)
        ready = [state.ready for state in states]
        if all(ready):
            return
        if any(ready):
            self.stop()
            raise StageLost(
                f"ranks {[s.rank for s in states if not s.ready]} are new beside older ones; the group was ended, "
                "start the run again to rebuild it"
            )
        address = None
        if len(self.handles) > 1:
            address = wait_all([self.handles[0].open_rendezvous.remote()], timeout_s, "opening the ranks' rendezvous")[
                0
            ]
        self._together("init_model", address, timeout_s=timeout_s)

    def states(self) -> list[RankState]:
        """Return how each rank stands; answered also while it computes."""
        return self._all("ping", timeout_s=_PING_S)

    def version(self) -> int:
        """Return the policy version that all ranks hold.

        Raises:
            ContractError: they hold different ones; load a checkpoint.
        """
        versions = [state.version for state in self.states()]
        if len(set(versions)) > 1:
            raise ContractError(f"the ranks hold versions {versions}; load a checkpoint to bring them together")
        return versions[0]

    def update_actor(self, command: UpdateCommand) -> UpdateResult:
        """Apply a training step exactly once; see :meth:`ActorRolloutRefWorker.update_actor`."""
        return self._together("update_actor", command)[0]

    def infer_actor_batch(self, command: InferCommand) -> list[FileRecord]:
        """Write the policy's log-probs of a step's samples; returns all ranks' files."""
        return [record for records in self._together("infer_actor_batch", command) for record in records]

    def infer_ref_batch(self, command: InferCommand) -> list[FileRecord]:
        """Write the reference's scores of a step's samples; returns all ranks' files."""
        return [record for records in self._together("infer_ref_batch", command) for record in records]

    def update_weights(self, folder: str, network: str = "policy") -> WrittenWeights:
        """Write the policy, or its ``average``, into a folder that replicas can read."""
        return self._together("update_weights", folder, network, self.epoch, timeout_s=self.config.weights.timeout_s)[0]

    def weights_checksum(self, network: str = "policy") -> str:
        """Return the checksum that :meth:`update_weights` would give, without writing anything."""
        timeout_s = self.config.weights.timeout_s
        return self._together("weights_checksum", network, self.epoch, timeout_s=timeout_s)[0]

    def sample(self, command: ProbeCommand) -> torch.Tensor:
        """Draw one sample with the trainer's own network; returns its final latents."""
        return self._together("sample", command, timeout_s=self.config.weights.timeout_s)[0]

    def save_checkpoint(self, folder: str) -> list[str]:
        """Write a verified checkpoint; returns the files' names."""
        return self._together("save_checkpoint", folder, self.epoch)[0]

    def load_checkpoint(self, folder: str) -> int:
        """Go on from a checkpoint; returns its policy version."""
        return self._together("load_checkpoint", folder, self.epoch)[0]

    def copy_adapter(self, source: str, target: str) -> None:
        """Make an adapter equal to another on all ranks."""
        self._together("copy_adapter", source, target, self.epoch)

    def ema_update_adapter(self, source: str, target: str, decay: float) -> None:
        """Move an adapter towards another on all ranks."""
        self._together("ema_update_adapter", source, target, decay, self.epoch)

    def stop(self) -> None:
        """End all ranks."""
        for handle in self.handles:
            ray.kill(handle)

    def _all(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        references = [getattr(handle, method).remote(*arguments) for handle in self.handles]
        return wait_all(references, timeout_s, f"trainer: {method}")

    def _together(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method in which ranks wait for each other; one that is left waiting would never answer again."""
        timeout_s = timeout_s or self.config.training.step_timeout_s
        try:
            return self._all(method, *arguments, timeout_s=timeout_s)
        except (StageLost, DeadlineError):
            self.stop()
            raise


def wait_all(references: Sequence[ray.ObjectRef], timeout_s: float, what: str) -> list[Any]:
    """Wait for the ranks' answers, in slices.

    Raises:
        StageLost: an actor died, or did not answer within 15 s after another one had failed.
        DeadlineError: no answer in time. Else the first rank's own error, once all have answered.
    """
    deadline = time.monotonic() + timeout_s
    pending = list(references)
    errors: dict[int, Exception] = {}
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, min(_SLICE_S, deadline - time.monotonic())))
        for reference in done:
            try:
                ray.get(reference)
            except Exception as error:  # noqa: BLE001 - whatever a rank raised decides what happens to the others
                errors[references.index(reference)] = error
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if pending and time.monotonic() >= deadline:
            break
    dead = {rank: error for rank, error in errors.items() if isinstance(error, ray.exceptions.RayActorError)}
    first = next(iter(errors.values()), None)
    if dead:
        raise StageLost(
            f"{what}: rank {min(dead)} of {len(references)} died ({_one_line(dead[min(dead)])}); start the stage "
            "again, it goes on from the last checkpoint"
        ) from dead[min(dead)]
    if pending and first is not None:
        raise StageLost(
            f"{what}: {len(pending)} of {len(references)} ranks did not answer within {_GRACE_S:.0f} s after another "
            f"one failed ({_one_line(first)})"
        ) from first
    if pending:
        raise DeadlineError(f"{what} took longer than {timeout_s:.0f} s; raise the deadline, or see the actors' logs")
    if errors:
        raise _own_error([errors[rank] for rank in sorted(errors)])
    return ray.get(list(references))


def _own_error(errors: list[Exception]) -> Exception:
    """Return what a rank raised. Where one refused, the others only say that another one did."""
    causes = [error.cause if isinstance(error, ray.exceptions.RayTaskError) else error for error in errors]
    own = [cause for cause in causes if isinstance(cause, Exception) and not _is_echo(cause)]
    return (
        own or [c if isinstance(c, Exception) else EngineError(str(e)) for c, e in zip(causes, errors, strict=True)]
    )[0]


def _is_echo(error: Exception) -> bool:
    return isinstance(error, ContractError) and str(error).startswith("another rank refused")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _name(rank: int) -> str:
    return f"trainer-{rank}"
