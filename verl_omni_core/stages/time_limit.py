"""Stop in time where the machine's time ends: with everything saved, and able to go on."""

from datetime import UTC, datetime

from verl_omni_core.errors import ConfigError
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.checkpoint import STAGE as CHECKPOINT
from verl_omni_core.stages.checkpoint import commit_state
from verl_omni_core.stages.finish import close
from verl_omni_core.stages.log import STAGE as LOG
from verl_omni_core.stages.metric_table import metrics_of
from verl_omni_core.stages.plan import STAGE as FIRST_STAGE
from verl_omni_core.stages.progress_budget import record_ending
from verl_omni_core.stages.session import RunRef, Session, session_of
from verl_omni_core.store.lineage import base_step
from verl_omni_core.store.runs import STOPPED, open_run


def refuse_past_end(config: RunConfig, now: datetime | None = None) -> None:
    """Raise ConfigError if ``run.end_by`` has passed: nothing could be done."""
    end_by = config.run.end_by
    if end_by is not None and end_by <= (now or datetime.now(UTC)):
        raise ConfigError(
            f"run.end_by is {end_by.isoformat()}, which has passed; give a later time, or none where the machine's "
            "time does not end"
        )


def has_time(run: RunRef, step: int, now: datetime | None = None) -> bool:
    """Say whether ``step`` and a snapshot after it fit into what is left until ``run.end_by``.

    A step is taken to last as long as the longest one of this process, validation and pictures included; before the
    first one of a resumed run, as long as the step before it did.
    """
    session = session_of(run)
    end_by = session.config.run.end_by
    if end_by is None:
        return True
    left = (end_by - (now or datetime.now(UTC))).total_seconds()
    return left >= needed_s(session, step) + session.config.run.end_margin_s


def needed_s(session: Session, step: int) -> float:
    """Return the seconds that ``step`` and a snapshot may take, from what earlier ones took; 0 if there are none."""
    return _longest_step(session, step) + _snapshot(session, step)


def stop_early(run: RunRef, step: int) -> str:
    """Save the state after ``step``, mark the run stopped, end its actors, and return what to do next.

    Raises:
        StoreError: the state could not be written; a later start replays stored batches instead.
    """
    session = session_of(run)
    config, folder = session.config, session.folder()
    if step > base_step(session.root):  # of the step that a fork begins after it has one
        commit_state(session, step)
    folder.write_progress(status=STOPPED, step=step)
    record_ending(session.root, run.epoch, STOPPED)
    close(session)
    return (
        f"Run {folder.run_id} stopped after step {step} of {config.run.steps}: its time ends at {config.run.end_by}.\n"
        f"All of it is saved. To go on: the same command with --run-id {folder.run_id}, and without run.resume if that "
        "was given"
    )


def _longest_step(session: Session, step: int) -> float:
    began = {each: times[FIRST_STAGE] for each, times in session.begins.items() if FIRST_STAGE in times}
    took = [began[each + 1] - began[each] for each in began if each + 1 in began]
    took += _seconds_of(session, step - 1)
    return max(took, default=0.0)


def _seconds_of(session: Session, step: int) -> list[float]:
    """Return how long a step took by its stages in this process, or else by its log; empty if neither knows."""
    own = session.spans.get(step, {})
    if own:
        return [sum(own.values())]
    log = session.store.find(step, LOG)
    metrics = {} if log is None else metrics_of(session.store.table(log, "metrics"))
    return [metrics["timing_s/step"]] if "timing_s/step" in metrics else []


def _snapshot(session: Session, step: int) -> float:
    for earlier in range(step - 1, max(step - 20, 0), -1):
        ref = session.store.find(earlier, CHECKPOINT)
        if ref is not None:
            return float(session.store.manifest(ref).producer.get("seconds", 0.0))
    return 0.0


def stopped_early(config: RunConfig) -> bool:
    """Say whether a run that has returned stopped before its last step."""
    if config.run.end_by is None:
        return False
    return open_run(config.run.store, str(config.run.id)).status() == STOPPED
