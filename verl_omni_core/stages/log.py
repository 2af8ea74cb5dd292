"""Collect a step's numbers: into its table, into TensorBoard, to whoever watches."""

from collections.abc import Sequence

from verl_omni_core.batches import columns
from verl_omni_core.batches.tables import read_tensor
from verl_omni_core.metrics.rl import rollout_correction_metrics, scorer_metrics
from verl_omni_core.metrics.timing import throughput_metrics, timing_metrics
from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.metric_table import metric_table, metrics_of
from verl_omni_core.stages.observe import observer
from verl_omni_core.stages.session import RunRef, Session, session_of
from verl_omni_core.store import runs
from verl_omni_core.store.manifest import ArtifactRef

STAGE = "log"
_TIMED_AS = {
    "rollout": "gen",
    "reference": "ref",
    "old_log_probs": "old_log_prob",
    "advantage": "adv",
    "update": "update_actor",
    "sync": "update_weights",
    "checkpoint": "save_checkpoint",
    "validate": "testing",
}
"""The field's names of stages in ``timing_s/*``, where they differ from ours."""


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
    metrics = metrics_of(session.store.table(done, "metrics"))
    session.folder().write_progress(status="running", step=step, reward=metrics.get("critic/rewards/mean"))
    session.tracker.scalars(step, metrics)
    observer().step_done(step, metrics)
    return done


def _collect(session: Session, step: int, sources: dict[str, ArtifactRef]) -> dict[str, float]:
    store, metrics = session.store, {"training/global_step": float(step)}
    for source in sources.values():
        if any(file.table == "metrics" for file in store.manifest(source).files):
            metrics |= metrics_of(store.table(source, "metrics"))
    summary = store.table(sources["reward"], "reward_summary")
    scores = {name: summary.column(name).to_pylist() for name in summary.column_names if name.startswith("reward/")}
    metrics |= scorer_metrics({**scores, "combined": summary.column(columns.RM_SCORE).to_pylist()})
    old = store.find(step, "old_log_probs")
    if old is not None:
        metrics |= rollout_correction_metrics(
            read_tensor(store.table(old, "logprobs"), columns.OLD_LOG_PROBS),
            read_tensor(store.table(sources["rollout"], "trajectories"), columns.ROLLOUT_LOG_PROBS),
        )
    seconds = dict(session.spans.get(step, {}))
    whole = sum(seconds.values())
    named = {_TIMED_AS.get(name, name): value for name, value in seconds.items()}
    metrics |= timing_metrics({**named, "step": whole}, len(summary))
    if whole > 0:
        metrics |= throughput_metrics(len(summary), whole, session.config.training.ranks)
    metrics["training/epoch"] = step * session.config.data.prompts_per_step / len(session.train_prompts)
    return metrics


def close(session: Session, status: str) -> None:
    """Say in the run's folder how it ended."""
    session.folder().write_progress(status=status, step=runs.steps_done(session.root))
