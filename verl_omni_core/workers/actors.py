"""The live actors of a run: named, detached, in a namespace of their own, so that any later process finds them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util import list_named_actors

from verl_omni_core.errors import ContractError, EngineError
from verl_omni_core.rewards._contract import Score, ScoringItem
from verl_omni_core.rollout._contract import DiffusionOutput, EngineInfo, LoadedWeights, SampleRequest
from verl_omni_core.rollout._options import engine_options
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store.runs import RunFolder
from verl_omni_core.workers.gpus import GpuShares, gpu_shares
from verl_omni_core.workers.namespaces import connect, end_actors, named, namespace_of, wait_for_end
from verl_omni_core.workers.replica import create_replica
from verl_omni_core.workers.reward_worker import RewardWorker
from verl_omni_core.workers.rollout_worker import PackResult, PackTask, RolloutWorker
from verl_omni_core.workers.router import ReplicaRouter
from verl_omni_core.workers.threads import environment
from verl_omni_core.workers.train_group import TrainGroup
from verl_omni_core.workers.waiting import wait_all

_CONCURRENCY = 1024
_PING_S = 30.0
_FREE_GPU_S = 20.0
_MARGIN_S = 60.0
"""Beyond the deadlines of samples and scores: what is left to pools and writers."""


@dataclass
class Actors:
    """Handles of everything that lives in a run's namespace."""

    config: RunConfig
    namespace: str
    train_group: TrainGroup | None
    """None in an evaluation, which trains nothing."""
    replicas: list[ActorHandle]
    rollout_workers: list[ActorHandle]
    reward_workers: list[ActorHandle]
    _held: tuple[str, int, list[LoadedWeights]] | None = None
    """Folder and version of the weights that were loaded last, and what the replicas said then."""

    @property
    def trainer(self) -> TrainGroup:
        """The trainer's ranks.

        Raises:
            ContractError: these actors are of an evaluation.
        """
        if self.train_group is None:
            raise ContractError(f"{self.namespace} has no trainer: it evaluates; start a run to train")
        return self.train_group

    @classmethod
    def start_or_find(cls, config: RunConfig, run: RunFolder, epoch: int, *, trains: bool = True) -> "Actors":
        """Connect to the cluster, create the actors that do not live yet, and start their engines side by side.

        Actors that this folder's run started with other settings, or a deleted run that had its place, are ended.

        Args:
            run: whose actors; this process owns it.
            trains: whether there is a trainer.

        Raises:
            DeadlineError: they did not start within ``cluster.actor_timeout_s``. Else what an engine's start raised.
        """
        namespace = namespace_of(config, run)
        connect(config.cluster)
        end_actors(config.cluster, run.root, but=namespace)
        shares = _shares(config, trains)
        _wait_for_gpus(config, namespace, shares, trains)
        trainer = TrainGroup.start(config, namespace, epoch=epoch, num_gpus=shares.rank) if trains else None
        actors = cls(config, namespace, trainer, [], [], [])
        actors._start_pools(shares)
        if trainer is not None:
            trainer.wait_until_ready(config.cluster.actor_timeout_s)
        return actors

    @classmethod
    def find(cls, config: RunConfig, run: RunFolder, epoch: int, *, trains: bool = True) -> "Actors":
        """Return the actors of a run that another process started.

        Raises:
            StageLost: one of them does not live; start the run again.
        """
        namespace = namespace_of(config, run)
        connect(config.cluster)
        return cls(
            config,
            namespace,
            TrainGroup.find(config, namespace, epoch=epoch) if trains else None,
            [named(namespace, f"replica-{i}") for i in range(config.rollout.replicas)],
            [named(namespace, f"rollout-{i}") for i in range(config.rollout.agent_workers)],
            [named(namespace, f"reward-{i}") for i in range(config.reward.workers)],
        )

    def repair(self) -> bool:
        """Rebuild the replicas and workers that died or no longer answer, and give new replicas the others' weights.

        The trainer is not rebuilt here: its group starts again from a checkpoint.

        Returns:
            Whether there were any.
        Raises:
            As :meth:`start_or_find` and :meth:`load_weights`.
        """
        lost = _lost(self.pools())
        for name, handle in lost.items():
            ray.kill(handle)
            wait_for_end(self.namespace, name)
        self._start_pools(_shares(self.config, self.train_group is not None))
        if lost and self._held is not None:
            folder, version, told = self._held
            if self.load_weights(folder, version) != told:
                raise ContractError(
                    f"version {version} loaded differently into the rebuilt replicas than before; start the run again"
                )
        return bool(lost)

    def run_packs(self, packs: Sequence[PackTask]) -> list[PackResult]:
        """Draw packs, spread over the rollout workers; results in the order of the packs."""
        references = [
            self.rollout_workers[index % len(self.rollout_workers)].run_pack.remote(pack)
            for index, pack in enumerate(packs)
        ]
        samples = sum(pack.requests.num_rows for pack in packs)
        scored = any(pack.score for pack in packs)
        # every sample and score has its own deadline; this one only ends a wait that those did not
        timeout = self.config.rollout.request_timeout_s + self.config.reward.timeout_s * scored + _MARGIN_S
        what = f"drawing{' and scoring' * scored} {samples} samples"
        return wait_all(references, timeout, what, progress=self._work_done)

    def score(self, items: Sequence[ScoringItem]) -> list[Mapping[str, Score]]:
        """Score samples, spread over the reward workers; results in the order of the items."""
        count = len(self.reward_workers)
        parts = [list(items[index::count]) for index in range(count)]
        references = [
            worker.score.remote(part) for worker, part in zip(self.reward_workers, parts, strict=True) if part
        ]
        timeout = self.config.reward.timeout_s + _MARGIN_S
        scored = wait_all(references, timeout, f"scoring {len(items)} samples", progress=self._work_done)
        found: list[Mapping[str, Score]] = [{}] * len(items)
        for index, scores in enumerate(scored):
            found[index::count] = scores
        return found

    def load_weights(self, folder: str, version: int) -> list[LoadedWeights]:
        """Load a weights folder into every replica."""
        references = [replica.load_weights.remote(folder, version) for replica in self.replicas]
        loaded = wait_all(references, self.config.weights.timeout_s, f"loading version {version}")
        self._held = folder, version, loaded
        return loaded

    def draw_on_every_replica(self, request: SampleRequest) -> list[DiffusionOutput]:
        """Draw one sample on each replica; none of them is asked through the router."""
        references = [replica.generate.remote(request) for replica in self.replicas]
        return wait_all(references, self.config.rollout.request_timeout_s, "drawing the probe sample")

    def gpus(self) -> int:
        """Return how many GPUs ranks and engines use: one's own each, or what there is if they share; 0 on CPUs."""
        ranks = self.config.training.ranks if self.train_group is not None else 0
        wanted = ranks + self.config.rollout.replicas * self.config.rollout.tensor_parallel
        return int(min(ray.cluster_resources().get("GPU", 0), wanted))

    def scorer_versions(self) -> dict[str, str]:
        """Return the version of each scorer, by name."""
        return dict(
            wait_all([self.reward_workers[0].versions.remote()], self.config.reward.timeout_s, "scorer versions")[0]
        )

    def scorer_ranges(self) -> dict[str, tuple[float, float]]:
        """Return the least and the largest score of each scorer, by name."""
        return dict(
            wait_all([self.reward_workers[0].ranges.remote()], self.config.reward.timeout_s, "scorer ranges")[0]
        )

    def describe_engines(self) -> list[dict[str, Any]]:
        """Return what each engine says about itself, its own count of finished requests among it."""
        timeout = self.config.rollout.request_timeout_s
        infos: list[EngineInfo] = wait_all(
            [r.describe.remote() for r in self.replicas], timeout, "describing the engines"
        )
        return [asdict(info) for info in infos]

    def stop(self) -> None:
        """End every actor of the namespace."""
        if self.train_group is not None:
            self.train_group.stop()
        for handle in self.pools().values():
            ray.kill(handle)

    def pools(self) -> dict[str, ActorHandle]:
        """Return the replicas and workers, all but the trainer's ranks, by name."""
        kinds = {"rollout": self.rollout_workers, "reward": self.reward_workers, "replica": self.replicas}
        return {f"{kind}-{index}": handle for kind, handles in kinds.items() for index, handle in enumerate(handles)}

    def _start_pools(self, shares: GpuShares) -> None:
        """Create the replicas and workers that do not live yet, start the engines, and make the workers know all."""
        config, namespace, timeout = self.config, self.namespace, self.config.cluster.actor_timeout_s
        self.replicas = [_replica(config, namespace, i, shares.replica) for i in range(config.rollout.replicas)]
        self.reward_workers = [_reward_worker(config, namespace, i) for i in range(config.reward.workers)]
        router = ReplicaRouter(
            self.replicas, config.run.deterministic, request_timeout_s=config.rollout.request_timeout_s
        )
        known = (router, self.reward_workers)
        self.rollout_workers = [
            _actor(RolloutWorker, namespace, f"rollout-{i}", config.rollout.threads).remote(config, *known)
            for i in range(config.rollout.agent_workers)
        ]
        options = engine_options(config)
        wait_all([replica.start.remote(options) for replica in self.replicas], timeout, "starting the engines")
        wait_all([worker.ping.remote() for worker in self.reward_workers], timeout, "starting the reward workers")
        # one that lives already still holds the handles of its birth
        wait_all([w.connect.remote(*known) for w in self.rollout_workers], timeout, "starting the rollout workers")

    def _work_done(self) -> dict[str, int]:
        drawn = _answers([worker.ping.remote() for worker in self.rollout_workers])
        scored = _answers([worker.ping.remote() for worker in self.reward_workers])
        return {"requests": sum(drawn.values()), "scores": sum(scored.values())}


def _shares(config: RunConfig, trains: bool) -> GpuShares:
    return gpu_shares(
        ranks=config.training.ranks if trains else 0,
        replicas=config.rollout.replicas,
        tensor_parallel=config.rollout.tensor_parallel,
        total=int(ray.cluster_resources().get("GPU", 0)),
    )


def _wait_for_gpus(config: RunConfig, namespace: str, shares: GpuShares, trains: bool) -> None:
    """Wait a moment until the GPUs that the missing actors need are free: those of ended actors return with a delay.

    Raises:
        EngineError: others hold them.
    """
    wanted = {f"replica-{index}": shares.replica for index in range(config.rollout.replicas)}
    wanted |= {f"trainer-{index}": shares.rank for index in range(config.training.ranks if trains else 0)}
    living = list_named_actors(all_namespaces=True)
    own = {actor["name"] for actor in living if actor["namespace"] == namespace}
    needed = sum(share for name, share in wanted.items() if name not in own)
    deadline = time.monotonic() + _FREE_GPU_S
    while (free := ray.available_resources().get("GPU", 0)) < needed:
        if time.monotonic() > deadline:
            others = sorted({actor["namespace"] for actor in living} - {namespace})
            raise EngineError(
                f"the missing actors of {namespace} need {needed:g} GPUs, {free:g} are free; actors live in "
                f"{', '.join(others) or 'no other namespace'}: end what is not needed (verl-omni teardown RUN)"
            )
        time.sleep(0.5)


def _lost(actors: Mapping[str, ActorHandle]) -> dict[str, ActorHandle]:
    """Return the actors, by name, that are dead or do not answer a ping."""
    references = {name: handle.ping.remote() for name, handle in actors.items()}
    answers = _answers(list(references.values()))
    return {name: actors[name] for name, reference in references.items() if reference not in answers}


def _answers(pings: Sequence[ray.ObjectRef]) -> dict[ray.ObjectRef, Any]:
    """Return the answers of those that live, at most 30 s later."""
    ready, _ = ray.wait(list(pings), num_returns=len(pings), timeout=_PING_S)
    found = {}
    for reference in ready:
        try:
            found[reference] = ray.get(reference)
        except ray.exceptions.RayActorError:
            continue  # dead: whoever waits for its work gets the error
    return found


def _replica(config: RunConfig, namespace: str, index: int, num_gpus: float) -> ActorHandle:
    name = f"replica-{index}"
    return create_replica(
        name, config.rollout.name, **_options(namespace, name, config.rollout.threads), num_gpus=num_gpus
    )


def _reward_worker(config: RunConfig, namespace: str, index: int) -> ActorHandle:
    return _actor(RewardWorker, namespace, f"reward-{index}", 1).remote(config.reward)


def _actor(cls: type, namespace: str, name: str, threads: int) -> Any:
    return ray.remote(cls).options(**_options(namespace, name, threads), max_concurrency=_CONCURRENCY)


def _options(namespace: str, name: str, threads: int) -> dict[str, Any]:
    # CPUs are shared by thread settings, not by Ray's slots: the actors of a small machine take turns
    return {
        "namespace": namespace,
        "name": name,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "runtime_env": {"env_vars": environment(threads)},
    }
