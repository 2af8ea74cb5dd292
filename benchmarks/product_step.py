"""A training step of the product, as the flow ``online`` runs it, in turn with the same step of an in-memory loop."""

import os
import time
from dataclasses import dataclass, field

import psutil
from prefect import flow

from benchmarks.in_memory_step import InMemoryLoop, InMemoryStep
from tasks.evaluation import log_step
from tasks.reward import score
from tasks.rollout import generate, plan_step
from tasks.run import open_run
from tasks.update import estimate_advantages, evaluate_reference, recompute_old_log_probs, train_on
from tasks.weights import sync_weights
from verl_omni_core.batches import columns
from verl_omni_core.cluster import prefect_server, services
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.finish import close
from verl_omni_core.stages.session import RunRef, Session, session_of

WARM_UP = 2
"""Steps of each before the first that counts."""


@dataclass(frozen=True)
class ProductStep:
    """What one step of the product took."""

    seconds: float
    stages: dict[str, float]
    """Seconds inside each stage function; what is left of ``seconds`` is the orchestrator's."""


@dataclass
class Measured:
    """All pairs of steps, and steps that were committed and run again."""

    product: list[ProductStep] = field(default_factory=list)
    in_memory: list[InMemoryStep] = field(default_factory=list)
    noop: list[ProductStep] = field(default_factory=list)
    are_equal: bool = True
    """Whether rewards and weights of every pair had the same bits."""
    server_cpu_s: float = 0.0
    """CPU seconds of the Prefect server a pair: work that may fall outside the product's own time."""


def measure(config: RunConfig, pairs: int, repeats: int) -> Measured:
    """Run pairs of steps in one flow run, the two orders in turn.

    Args:
        config: of a new run with more than ``pairs + WARM_UP`` steps and none of what happens only every few steps.
        pairs: that count.
        repeats: times that the last step runs again.
    """

    @flow(name="step-overhead", log_prints=False)
    def step_overhead() -> Measured:
        run = open_run(config)
        try:
            return _measure(run, pairs, repeats)
        finally:
            close(session_of(run))

    return step_overhead()


def _measure(run: RunRef, pairs: int, repeats: int) -> Measured:
    session, measured, last = session_of(run), Measured(), pairs + WARM_UP
    sync_weights(run, 0)
    # Ray lowers its actors' priority; with another one, whatever else runs would slow one side only
    os.setpriority(os.PRIO_PROCESS, 0, psutil.Process(session.actors.trainer.states()[0].pid).nice())
    loop = InMemoryLoop(session.config)
    try:
        cpu_s = 0.0
        for step in range(1, last + 1):
            if step == WARM_UP + 1:
                cpu_s = _server_cpu_s()
            if step % 2:
                product, in_memory = _product_step(run, step), loop.step(step)
            else:
                in_memory, product = loop.step(step), _product_step(run, step)
            if step > WARM_UP:
                measured.product.append(product)
                measured.in_memory.append(in_memory)
            measured.are_equal &= _is_equal(session, step, in_memory)
        measured.server_cpu_s = (_server_cpu_s() - cpu_s) / pairs
    finally:
        loop.close()
    measured.noop = [_product_step(run, last) for _ in range(repeats)]
    return measured


def _product_step(run: RunRef, step: int) -> ProductStep:
    begun = time.perf_counter()
    planned = plan_step(run, step)
    samples = generate(run, step, planned)
    rewards = score(run, step, planned, samples)
    old = recompute_old_log_probs(run, step, samples)
    reference = evaluate_reference(run, step, samples)
    advantages = estimate_advantages(run, step, rewards)
    updated = train_on(run, step, samples, advantages, old, reference)
    sync_weights(run, step)
    logging_begun = time.perf_counter()
    log_step(run, step, [samples, rewards, advantages, updated])
    ended = time.perf_counter()
    return ProductStep(ended - begun, {**session_of(run).spans[step], "log": ended - logging_begun})


def _is_equal(session: Session, step: int, other: InMemoryStep) -> bool:
    rewards, weights = session.store.find(step, "reward"), session.store.find(step, "sync")
    assert rewards is not None and weights is not None
    summary = session.store.table(rewards, "reward_summary")
    own = summary.column(columns.RM_SCORE).to_numpy().tolist()
    return own == other.rewards and session.store.manifest(weights).producer["checksum"] == other.checksum


def _server_cpu_s() -> float:
    server = services.find(prefect_server.NAME)
    if server is None:
        return 0.0
    process = psutil.Process(server.pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(time.user + time.system for time in times)
