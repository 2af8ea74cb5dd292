"""The end of a run: the report, the pictures, the summary. Everything is read from the store."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from verl_omni_core.identity import digest
from verl_omni_core.metrics.validation import prompt_statistics
from verl_omni_core.report.html import Report, write_report
from verl_omni_core.report.images import PicturePair, before_after, write_picture
from verl_omni_core.report.summary import summary
from verl_omni_core.settings import tree
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages import comparison
from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.log import STAGE as LOG
from verl_omni_core.stages.metric_table import metrics_of
from verl_omni_core.stages.progress_budget import FINISHED, record_ending
from verl_omni_core.stages.session import RunRef, Session, let_go, session_of
from verl_omni_core.stages.validate import STAGE as VALIDATE
from verl_omni_core.stages.validate import rewards_by_prompt
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.attempt import COMMIT, read_commit
from verl_omni_core.store.lease import owners
from verl_omni_core.store.manifest import ArtifactRef

STAGE = "finish"
REPORT, PICTURE, SUMMARY = "report.html", "images/before_after.png", "summary.txt"
REWARD = "critic/rewards/mean"


def finish(run: RunRef) -> str:
    """Write the report and the before/after picture, commit the summary and return it.

    A run whose summary is committed is finished: see :func:`finished_summary`.
    """
    session = session_of(run)
    root, folder = session.root, session.folder()
    folder.write_engines(session.actors.describe_engines())
    pairs = comparison.picture_pairs(session, session.config.tracking.grid_prompts)
    picture = write_picture(root / PICTURE, before_after(pairs)) if pairs else None
    seconds = seconds_worked(session, datetime.now(UTC))
    content = report_of(session, pairs, seconds)
    text = summary(
        run_id=folder.run_id,
        steps=content.steps,
        seconds=seconds,
        held_out=content.held_out,
        report=write_report(root / REPORT, content),
        picture=picture,
    )
    (root / SUMMARY).write_text(text + "\n")
    _commit(session, text)
    record_ending(root, run.epoch, FINISHED)
    folder.write_progress(status="finished", step=content.steps, reward=content.metrics.get(REWARD))
    close(session)
    return text


def finished_summary(root: str | Path, steps: int) -> str | None:
    """Return the summary of the run in ``root`` if it finished with ``steps`` steps. Changes nothing."""
    store = RunStore(root)
    ref = store.find(steps, STAGE)
    return None if ref is None else store.path_of(ref, SUMMARY).read_text()


def _commit(session: Session, text: str) -> None:
    store, step = session.store, session.config.run.steps
    key = stage_key(STAGE, step, [])
    if store.committed(step, STAGE, key) is not None:
        return
    parents = [ref for name in (LOG, VALIDATE) if (ref := store.find(step, name)) is not None]
    attempt = store.attempt(step, STAGE, key, parents=parents)
    attempt.commit(
        [attempt.write_file(SUMMARY, text.encode())], rows=step, parents=parents, producer=session.producer()
    )


def report_of(session: Session, pairs: list[PicturePair], seconds: float) -> Report:
    """Return what the run's committed tables say, for its report."""
    config, folder, store = session.config, session.folder(), session.store
    rewards_PG = {
        step: rewards_by_prompt(session, ref) for step, ref in comparison.artifacts(session, "validate").items()
    }
    logged = comparison.artifacts(session, "log")
    metrics = {step: metrics_of(store.table(ref, "metrics")) for step, ref in logged.items()}
    return Report(
        run_id=folder.run_id,
        steps=config.run.steps,
        seconds=seconds,
        rewards=[(step, values[REWARD]) for step, values in metrics.items() if REWARD in values],
        validations=[(step, float(np.nanmean(values))) for step, values in rewards_PG.items()],
        held_out=comparison.held_out(session),
        statistics={step: prompt_statistics(values) for step, values in rewards_PG.items()},
        pairs=pairs,
        metrics=metrics[max(metrics)] if metrics else {},
        settings_digest=digest(config.model_dump(mode="json")),
        settings={name: value_at(config, name) for name in tree.fields()},
        engine=_engine(folder.engines()),
    )


def seconds_worked(session: Session, now: datetime) -> float:
    """Return the time that the run took: of each of its owners, from taking the run to the last commit.

    For the owner at work that is until ``now``. Start-up and validation count; time without an owner does not.
    """
    newest: dict[int, list[ArtifactRef]] = {}
    for marker in sorted(session.root.glob(f"steps/*/*/{COMMIT}")):
        ref = read_commit(marker.parent)
        if ref is not None:
            epoch = int(ref.attempt.partition("-")[0])
            refs = newest.get(epoch, [])
            newest[epoch] = [*(kept for kept in refs if kept.step == ref.step), ref]
    seconds = 0.0
    for owner in owners(session.root):
        began, refs = datetime.fromisoformat(owner["since"]), newest.get(owner["epoch"], [])
        ended = [datetime.fromisoformat(session.store.manifest(ref).producer["finished"]) for ref in refs]
        last = now if owner["epoch"] == session.ref.epoch else max(ended, default=began)
        seconds += max((last - began).total_seconds(), 0.0)
    return seconds


def value_at(config: RunConfig, name: str) -> Any:
    """Return a setting by its dotted name."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _engine(recorded: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    replicas = recorded["replicas"]
    if not replicas:
        return {}
    shown = {name: value for name, value in replicas[0].items() if name != "instance"}
    requests = sum(engine["requests"] for engine in (*replicas, *recorded["earlier"]))
    return {**shown, "replicas": len(replicas), "requests": requests}


def close(session: Session) -> None:
    """Let go of a finished run: its tracker, its actors unless they are to be kept, its ownership."""
    try:
        if not session.config.cluster.keep_actors:
            session.actors.stop()
    finally:
        let_go(session.ref.root)
