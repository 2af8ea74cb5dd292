"""Collect a step's numbers: into its table, into TensorBoard, to whoever watches."""

import time
from collections.abc import Sequence

import numpy as np

from verl_omni_core.batches import columns
from verl_omni_core.batches.tables import read_tensor
from verl_omni_core.metrics.rl import off_policy_metrics, rollout_correction_metrics, scorer_metrics
from verl_omni_core.metrics.timing import throughput_metrics, timing_metrics
from verl_omni_core.stages.checkpoint import STAGE as CHECKPOINT
from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.metric_table import metric_table, metrics_of
from verl_omni_core.stages.observe import observer
from verl_omni_core.stages.plan import STAGE as FIRST_STAGE
from verl_omni_core.stages.retention import retain
from verl_omni_core.stages.session import RunRef, Session, session_of
from verl_omni_core.stages.validate import STAGE as VALIDATE
from verl_omni_core.store import index, runs
from verl_omni_core.store.manifest import ArtifactRef

STAGE = index.LAST_STAGE
_TIMED_AS = {
    "rollout": "gen",
    "reference": "ref",
    "old_log_probs": "old_log_prob",
    "advantage": "adv",
    "update": "update_actor",
    "sync": "update_weights",
    "checkpoint": "save_checkpoint",
    "begin_checkpoint": "copy_checkpoint",
    "validate": "testing",
}
"""The field's names of stages in ``timing_s/*``, where they differ from ours."""
_BESIDE_THE_STEP = ("validate", "preview", "begin_checkpoint", "checkpoint")
"""What happens between a step's plan and its log without being part of it."""


def log(run: RunRef, step: int, sources: Sequence[ArtifactRef]) -> ArtifactRef:
    """Commit the ``metrics`` table of a step and show it.

    Args:
        sources: the step's artifacts, those of rollout and reward among them.
    """
    session = session_of(run)
    key = stage_key(STAGE, step, list(sources))
    done = session.store.committed(step, STAGE, key)
    if done is None:
        metrics = _collect(session, step, {source.stage: source for source in sources})
        attempt = session.store.attempt(step, STAGE, key, parents=list(sources))
        files = [attempt.write_table("metrics", 0, metric_table(step, metrics))]
        done = attempt.commit(files, rows=len(metrics), parents=list(sources), producer=session.producer())
    index.extend(session.store, session.ledger, step)
    retain(session, step)
    metrics = metrics_of(session.store.table(done, "metrics"))
    session.folder().write_progress(status="running", step=step, reward=metrics.get("critic/rewards/mean"))
    # validation has sent its own
    session.tracker.scalars(step, {name: value for name, value in metrics.items() if not name.startswith("val-")})
    observer().step_done(step, metrics)
    return done


def _collect(session: Session, step: int, sources: dict[str, ArtifactRef]) -> dict[str, float]:
    store, metrics = session.store, {"training/global_step": float(step)}
    for source in sources.values():
        if any(file.table == "metrics" for file in store.manifest(source).files):
            metrics |= metrics_of(store.table(source, "metrics"))
    validation = store.find(step, VALIDATE)
    if validation is not None:
        metrics |= metrics_of(store.table(validation, "metrics"))
    summary = store.table(sources["reward"], "reward_summary")
    scores = {name: summary.column(name).to_pylist() for name in summary.column_names if name.startswith("reward/")}
    metrics |= scorer_metrics({**scores, "combined": summary.column(columns.RM_SCORE).to_pylist()})
    # of all samples: the rollout takes no other one, and its trajectories are large
    drew = np.array([store.manifest(sources["rollout"]).producer["weights_version"]])
    metrics |= off_policy_metrics(step, drew, drew)
    old = store.find(step, "old_log_probs")
    if old is not None:
        drawn = store.table(sources["rollout"], "trajectories")
        metrics |= rollout_correction_metrics(
            read_tensor(store.table(old, "logprobs"), columns.OLD_LOG_PROBS),
            read_tensor(drawn, columns.ROLLOUT_LOG_PROBS),
            timesteps=read_tensor(drawn, columns.ALL_TIMESTEPS),
        )
    metrics["training/epoch"] = step * session.config.data.prompts_per_step / len(session.train_prompts)
    return metrics | _times(session, step, len(summary))


def _times(session: Session, step: int, samples: int) -> dict[str, float]:
    """Return the step's times so far; of a step that an earlier owner began only those that this one can know."""
    spans = {name: s for name, s in session.spans.get(step, {}).items() if _is_own(session, step, name)}
    # a checkpoint is waited for in the step after its own
    earlier = session.spans.get(step - 1, {}).get(CHECKPOINT)
    if earlier is not None and _is_own(session, step - 1, CHECKPOINT):
        spans[CHECKPOINT] = earlier
    named = {_TIMED_AS.get(name, name): seconds for name, seconds in spans.items()}
    begun = session.begins.get(step, {}).get(FIRST_STAGE)
    if begun is None or not _is_own(session, step, FIRST_STAGE):
        return timing_metrics(named, 0) | {"perf/total_num_images": float(samples)}
    whole = time.perf_counter() - begun - sum(spans.get(name, 0.0) for name in _BESIDE_THE_STEP)
    inside = sum(seconds for name, seconds in spans.items() if name not in _BESIDE_THE_STEP)
    return {
        **timing_metrics({**named, "step": whole}, samples),
        **throughput_metrics(samples, whole, max(session.actors.gpus(), 1)),
        "flow/overhead_s": whole - inside,
    }


def _is_own(session: Session, step: int, stage: str) -> bool:
    """Say whether this owner did a stage; one that it found committed took no time."""
    done = session.store.find(step, stage)
    return done is None or session.store.manifest(done).fence_epoch == session.ref.epoch


def close(session: Session, status: str) -> None:
    """Say in the run's folder how it ended."""
    session.folder().write_progress(status=status, step=runs.steps_done(session.root))
