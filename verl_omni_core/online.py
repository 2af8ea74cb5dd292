"""The whole run as plain Python: the stages of ``flows/online.py`` without an orchestrator, with equal results."""

from collections.abc import Mapping

from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.advantage import advantage
from verl_omni_core.stages.checkpoint import checkpoint
from verl_omni_core.stages.ending import let_go_on_failure
from verl_omni_core.stages.finish import finish
from verl_omni_core.stages.log import log
from verl_omni_core.stages.log_probs import old_log_probs, reference
from verl_omni_core.stages.opening import finished, open_run
from verl_omni_core.stages.plan import plan
from verl_omni_core.stages.preview import preview
from verl_omni_core.stages.reward import reward
from verl_omni_core.stages.rollout import rollout
from verl_omni_core.stages.schedule import due, policy_version, snapshot_due
from verl_omni_core.stages.session import RunRef
from verl_omni_core.stages.snapshot import begin_checkpoint
from verl_omni_core.stages.sync import sync
from verl_omni_core.stages.time_limit import has_time, stop_early
from verl_omni_core.stages.update import update
from verl_omni_core.stages.validate import validate


def train(config: RunConfig, origins: Mapping[str, str] | None = None) -> str:
    """Train by reinforcement learning; return the summary of the run, or why it stopped before its machine's time ends.

    Args:
        config: the run's settings. A run whose id exists goes on where it stopped; a finished one says so.
        origins: where each setting comes from, by dotted name; saved with the run.

    Raises:
        ConfigError, DataError: the settings cannot work; nothing was started.
    """
    done = finished(config)
    if done is not None:
        return done
    run = open_run(config, origins)
    with let_go_on_failure(run):
        sync(run, policy_version(run.done + 1, config.weights.sync_interval))
        if config.run.validate_before and run.done == 0:
            validate(run, 0)
        for step in range(run.done + 1, config.run.steps + 1):
            if not has_time(run, step):
                return stop_early(run, step - 1)
            train_step(run, config, step)
        if snapshot_due(config, config.run.steps):
            checkpoint(run, config.run.steps)
        return finish(run)


def train_step(run: RunRef, config: RunConfig, step: int) -> None:
    """Run one step; stages that are committed return at once."""
    planned = plan(run, step)
    samples = rollout(run, step, planned)
    rewards = reward(run, step, planned, samples)
    old = old_log_probs(run, step, samples)
    ref = reference(run, step, samples)
    advantages = advantage(run, step, rewards)
    if snapshot_due(config, step - 1):
        checkpoint(run, step - 1)
    updated = update(run, step, samples, advantages, old, ref)
    begin_checkpoint(run, step)
    if due(step, config.weights.sync_interval, config.run.steps):
        sync(run, step)
    if due(step, config.run.validate_every, config.run.steps):
        validate(run, step)
    if due(step, config.run.images_every, 0):
        preview(run, step)
    log(run, step, [samples, rewards, advantages, updated])
