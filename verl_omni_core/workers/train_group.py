"""The trainer's ranks as the driver sees them: one call reaches all of them, and every wait ends.

Ranks that answer differently cannot go on together. If one died, or hangs while another failed, the group is ended: a
fresh one starts from the last checkpoint.
"""

from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

from verl_omni_core.errors import ContractError, DeadlineError, StageLost
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store.attempt import Attempt
from verl_omni_core.store.manifest import FileRecord
from verl_omni_core.workers.commands import (
    CONTROL,
    InferCommand,
    ProbeCommand,
    RankState,
    UpdateCommand,
    UpdateResult,
    WrittenSnapshot,
    WrittenWeights,
)
from verl_omni_core.workers.threads import environment
from verl_omni_core.workers.waiting import wait_all

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
        handles = []
        for rank in range(config.training.ranks):
            living = _living(_name(rank), namespace)
            if living is not None:
                handles.append(living)
                continue
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
            handles.append(_actor().options(**options | actor_options).remote(config, rank, config.training.ranks))
        return cls(config, handles, epoch)

    @classmethod
    def find(cls, config: RunConfig, namespace: str, *, epoch: int | None = None) -> "TrainGroup":
        """Return the group whose ranks live in ``namespace``.

        Raises:
            StageLost: a rank does not live.
        """
        handles = []
        for rank in range(config.training.ranks):
            living = _living(_name(rank), namespace)
            if living is None:
                raise StageLost(f"{_name(rank)} of {namespace} does not live; start the run again to rebuild it")
            handles.append(living)
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

    def owned_since(self) -> int:
        """Return the oldest epoch that any rank obeys; 0 if one has never had an owner."""
        return min(state.epoch for state in self.states())

    def obey(self, epoch: int) -> None:
        """Let every rank obey the owner of ``epoch``, and refuse older ones from now on."""
        self._all("ping", epoch, timeout_s=_PING_S)

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

    def begin_snapshot(self, attempt: Attempt) -> None:
        """Copy all that training goes on from and let the ranks write it beside what they do next."""
        self._together("begin_snapshot", attempt, self.epoch)

    def finish_snapshot(self, attempt: Attempt) -> WrittenSnapshot:
        """Wait until what :meth:`begin_snapshot` began is on the disk and read back."""
        timeout_s = self.config.durability.snapshot_timeout_s
        return self._together("finish_snapshot", attempt, timeout_s, self.epoch, timeout_s=timeout_s + _GRACE_S)[0]

    def save_checkpoint(self, folder: str) -> list[str]:
        """Write a verified checkpoint; returns the files' names."""
        return self._together("save_checkpoint", folder, self.epoch)[0]

    def load_checkpoint(self, folder: str) -> int:
        """Go on from a checkpoint; returns its policy version."""
        return self._together("load_checkpoint", folder, self.epoch)[0]

    def reset(self) -> None:
        """Bring all ranks to before the first step."""
        self._together("reset", self.epoch, timeout_s=self.config.cluster.actor_timeout_s)

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

    def _all(self, method: str, *arguments: Any, timeout_s: float, grace_s: float | None = None) -> list[Any]:
        references = [getattr(handle, method).remote(*arguments) for handle in self.handles]
        return wait_all(references, timeout_s, f"trainer: {method}", grace_s=grace_s)

    def _together(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method in which ranks wait for each other; one that is left waiting would never answer again."""
        timeout_s = timeout_s or self.config.training.step_timeout_s
        try:
            return self._all(method, *arguments, timeout_s=timeout_s, grace_s=_GRACE_S)
        except (StageLost, DeadlineError):
            self.stop()
            raise


def _name(rank: int) -> str:
    return f"trainer-{rank}"


def _living(name: str, namespace: str) -> ActorHandle | None:
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def _actor() -> Any:
    # imported late: it loads the training libraries, which a process that finds its ranks alive does without
    from verl_omni_core.workers.actor_rollout_ref import ActorRolloutRefWorker

    # a rank computes one command at a time; meanwhile one may wait for a snapshot and another gets its ping
    return ray.remote(concurrency_groups={CONTROL: 2})(ActorRolloutRefWorker)
