"""Online RL: sample, score, learn, and again."""

from typing import Any

from prefect import flow

from tasks.evaluation import draw_preview, log_step, validate_policy
from tasks.reward import score
from tasks.rollout import generate, plan_step
from tasks.run import finish_run, finished_run, named_run, open_run, run_name, stop_run, stopped
from tasks.update import estimate_advantages, evaluate_reference, recompute_old_log_probs, train_on
from tasks.weights import save_checkpoint, sync_weights
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.ending import let_go_on_failure
from verl_omni_core.stages.schedule import due, policy_version, snapshot_due
from verl_omni_core.stages.time_limit import has_time


@flow(name="online", flow_run_name=run_name, log_prints=False)
def online(config: RunConfig, overrides: list[str] | None = None, origins: dict[str, str] | None = None) -> Any:
    """Train a generator by reinforcement learning against its own samples.

    Args:
        config: The run's settings. Without a name the run is called after the flow run, which a retry then resumes. A
            run that exists goes on; a finished one says so.
        overrides: Changes to single settings, each ``a.b=c``.
        origins: Where each setting comes from, by dotted name; saved with the run.

    Returns:
        The summary of the run. One that stops because its machine's time ends is completed under the name Stopped.
    """
    config = named_run(config, overrides)
    done = finished_run(config)
    if done is not None:
        return done
    run = open_run(config, origins)
    with let_go_on_failure(run):
        sync_weights(run, policy_version(run.done + 1, config.weights.sync_interval))
        if config.run.validate_before and run.done == 0:
            validate_policy(run, 0)
        for step in range(run.done + 1, config.run.steps + 1):
            if not has_time(run, step):
                return stopped(stop_run(run, step - 1))
            planned = plan_step(run, step)
            samples = generate(run, step, planned)
            rewards = score(run, step, planned, samples)
            old = recompute_old_log_probs(run, step, samples)
            reference = evaluate_reference(run, step, samples)
            advantages = estimate_advantages(run, step, rewards)
            if snapshot_due(config, step - 1):
                save_checkpoint(run, step - 1)
            updated = train_on(run, step, samples, advantages, old, reference)
            if due(step, config.weights.sync_interval, config.run.steps):
                sync_weights(run, step)
            if due(step, config.run.validate_every, config.run.steps):
                validate_policy(run, step)
            if due(step, config.run.images_every, 0):
                draw_preview(run, step)
            log_step(run, step, [samples, rewards, advantages, updated])
        if snapshot_due(config, config.run.steps):
            save_checkpoint(run, config.run.steps)
        return finish_run(run)
