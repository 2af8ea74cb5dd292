"""The live actors of a run: named, detached, in a namespace of their own, so that any later process finds them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util import list_named_actors

from verl_omni_core.cluster import ray_head
from verl_omni_core.errors import ContractError, StageLost
from verl_omni_core.rewards._contract import Score, ScoringItem
from verl_omni_core.rollout._contract import DiffusionOutput, EngineInfo, EngineOptions, LoadedWeights, SampleRequest
from verl_omni_core.settings.resolve import model_path
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.workers.replica import create_replica
from verl_omni_core.workers.reward_worker import RewardWorker
from verl_omni_core.workers.rollout_worker import PackResult, PackTask, RolloutWorker
from verl_omni_core.workers.router import ReplicaRouter
from verl_omni_core.workers.threads import environment
from verl_omni_core.workers.train_group import TrainGroup, wait_all

_CONCURRENCY = 1024


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
    def start_or_find(cls, config: RunConfig, run_id: str, epoch: int, *, trains: bool = True) -> "Actors":
        """Connect to the cluster, create the actors that do not live yet, and start their engines side by side.

        Args:
            trains: whether there is a trainer.

        Raises:
            DeadlineError: they did not start within ``cluster.actor_timeout_s``. Else what an engine's start raised.
        """
        namespace = _connect(config, run_id)
        shares = _gpu_shares(config, trains)
        trainer = TrainGroup.start(config, namespace, epoch=epoch, num_gpus=shares.rank) if trains else None
        replicas = [_replica(config, namespace, i, shares.replica) for i in range(config.rollout.replicas)]
        rewards = [_reward_worker(config, namespace, i) for i in range(config.reward.workers)]
        router = ReplicaRouter(replicas, config.run.deterministic, request_timeout_s=config.rollout.request_timeout_s)
        workers = [
            _actor(RolloutWorker, namespace, f"rollout-{i}", config.rollout.threads).remote(config, router, rewards)
            for i in range(config.rollout.agent_workers)
        ]
        actors = cls(config, namespace, trainer, replicas, workers, rewards)
        options = engine_options(config)
        timeout = config.cluster.actor_timeout_s
        wait_all([replica.start.remote(options) for replica in replicas], timeout, "starting the engines")
        wait_all([worker.ping.remote() for worker in (*workers, *rewards)], timeout, "starting the workers")
        if trainer is not None:
            trainer.wait_until_ready(timeout)
        return actors

    @classmethod
    def find(cls, config: RunConfig, run_id: str, epoch: int, *, trains: bool = True) -> "Actors":
        """Return the actors of a run that another process started.

        Raises:
            StageLost: one of them does not live; start the run again.
        """
        namespace = _connect(config, run_id)
        return cls(
            config,
            namespace,
            TrainGroup.find(config, namespace, epoch=epoch) if trains else None,
            [_named(namespace, f"replica-{i}") for i in range(config.rollout.replicas)],
            [_named(namespace, f"rollout-{i}") for i in range(config.rollout.agent_workers)],
            [_named(namespace, f"reward-{i}") for i in range(config.reward.workers)],
        )

    def run_packs(self, packs: Sequence[PackTask]) -> list[PackResult]:
        """Draw packs, spread over the rollout workers; results in the order of the packs."""
        references = [
            self.rollout_workers[index % len(self.rollout_workers)].run_pack.remote(pack)
            for index, pack in enumerate(packs)
        ]
        samples = sum(pack.requests.num_rows for pack in packs)
        # every sample has its own deadline in the router; this one only ends a wait that those did not
        timeout = self.config.rollout.request_timeout_s * (1 + samples / self.config.rollout.max_batch)
        return wait_all(references, timeout, f"drawing {samples} samples")

    def score(self, items: Sequence[ScoringItem]) -> list[Mapping[str, Score]]:
        """Score samples, spread over the reward workers; results in the order of the items."""
        count = len(self.reward_workers)
        parts = [list(items[index::count]) for index in range(count)]
        references = [
            worker.score.remote(part) for worker, part in zip(self.reward_workers, parts, strict=True) if part
        ]
        timeout = self.config.reward.timeout_s * (1 + len(items) * self.config.reward.max_attempts)
        scored = wait_all(references, timeout, f"scoring {len(items)} samples")
        found: list[Mapping[str, Score]] = [{}] * len(items)
        for index, scores in enumerate(scored):
            found[index::count] = scores
        return found

    def load_weights(self, folder: str, version: int) -> list[LoadedWeights]:
        """Load a weights folder into every replica."""
        references = [replica.load_weights.remote(folder, version) for replica in self.replicas]
        return wait_all(references, self.config.weights.timeout_s, f"loading version {version}")

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
        for handle in (*self.rollout_workers, *self.reward_workers, *self.replicas):
            ray.kill(handle)


def engine_options(config: RunConfig) -> EngineOptions:
    """Return what a replica's engine is built from."""
    rollout = config.rollout
    return EngineOptions(
        model=config.model.name,
        path=str(model_path(config)),
        dtype=rollout.dtype,
        max_batch=rollout.max_batch,
        batch_wait_ms=rollout.batch_wait_ms,
        threads=rollout.threads,
        tensor_parallel=rollout.tensor_parallel,
        lora_rank=config.model.lora.rank,
        deterministic=config.run.deterministic,
        start_timeout_s=rollout.start_timeout_s,
        request_timeout_s=rollout.request_timeout_s,
        options=rollout.options,
    )


def end_actors(config: RunConfig, run_id: str) -> int:
    """End whatever lives of a run's actors; return how many did."""
    namespace = _connect(config, run_id)
    living = [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == namespace]
    for name in living:
        ray.kill(_named(namespace, name))
    return len(living)


def namespace_of(run_id: str) -> str:
    """Return the Ray namespace of a run."""
    return f"verl-omni-{run_id}"


@dataclass(frozen=True)
class _GpuShares:
    rank: float
    replica: float


def _gpu_shares(config: RunConfig, trains: bool) -> _GpuShares:
    """Give each rank and each engine its own GPUs where there are enough, else let them share."""
    available = ray.cluster_resources().get("GPU", 0)
    replica = config.rollout.tensor_parallel
    if not available:
        return _GpuShares(0, 0)
    wanted = (config.training.ranks if trains else 0) + config.rollout.replicas * replica
    return _GpuShares(1, replica) if available >= wanted else _GpuShares(0.4, 0.4 * replica)


def _connect(config: RunConfig, run_id: str) -> str:
    namespace = namespace_of(run_id)
    address = ray_head.given(config.cluster) or ray_head.wait(ray_head.launch(config.cluster))
    ray_head.connect(address, namespace)
    return namespace


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


def _named(namespace: str, name: str) -> ActorHandle:
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        raise StageLost(f"actor {name} of {namespace} does not live; start the run again to rebuild it") from None
