"""The end of a run: the report, the pictures, the summary. Everything is read from the store."""

import time

import numpy as np

from verl_omni_core.batches import columns
from verl_omni_core.batches.tables import read_tensor
from verl_omni_core.identity import digest
from verl_omni_core.metrics.validation import paired_bootstrap
from verl_omni_core.report.html import Report, write_report
from verl_omni_core.report.images import PicturePair, before_after, write_picture
from verl_omni_core.report.summary import HeldOut, summary
from verl_omni_core.stages.metric_table import metrics_of
from verl_omni_core.stages.session import RunRef, Session, let_go, session_of
from verl_omni_core.stages.validate import SAMPLES, rewards_by_prompt
from verl_omni_core.store.manifest import ArtifactRef

REPORT, PICTURE = "report.html", "images/before_after.png"
REWARD = "critic/rewards/mean"


def finish(run: RunRef) -> str:
    """Write the report and the before/after picture, mark the run finished, and return its summary."""
    session = session_of(run)
    root, folder = session.root, session.folder()
    steps = session.config.run.steps
    validations = _artifacts(session, "validate")
    held_out = _held_out(session, validations)
    pairs = _pairs(session, validations)
    picture = write_picture(root / PICTURE, before_after(pairs)) if pairs else None
    logs = _artifacts(session, "log")
    metrics = {step: metrics_of(session.store.table(ref, "metrics")) for step, ref in logs.items()}
    last = metrics[max(metrics)] if metrics else {}
    folder.write_engine({"replicas": session.actors.describe_engines()})  # now with its whole count of requests
    seconds = time.time() - (root / "run.json").stat().st_mtime
    report = write_report(
        root / REPORT,
        Report(
            run_id=folder.run_id,
            steps=steps,
            seconds=seconds,
            rewards=[
                (step, values["critic/rewards/mean"])
                for step, values in metrics.items()
                if "critic/rewards/mean" in values
            ],
            validations=[
                (step, float(np.nanmean(rewards_by_prompt(session, ref)))) for step, ref in validations.items()
            ],
            held_out=held_out,
            pairs=pairs,
            metrics=last,
            settings_digest=digest(session.config.model_dump(mode="json")),
            settings=session.config.model_dump(mode="json"),
            engine=folder.engine() or {},
        ),
    )
    text = summary(
        run_id=folder.run_id, steps=steps, seconds=seconds, held_out=held_out, report=report, picture=picture
    )
    (root / "summary.txt").write_text(text)
    folder.write_progress(status="finished", step=steps, reward=last.get(REWARD))
    close(session)
    return text


def close(session: Session) -> None:
    """Let go of a finished run: its tracker, its actors unless they are to be kept, its ownership."""
    session.tracker.close()
    if not session.config.cluster.keep_actors:
        session.actors.stop()
    let_go(session.ref.root)


def _artifacts(session: Session, stage: str) -> dict[int, ArtifactRef]:
    found = {step: session.store.find(step, stage) for step in session.store.steps()}
    return {step: ref for step, ref in found.items() if ref is not None}


def _held_out(session: Session, validations: dict[int, ArtifactRef]) -> HeldOut | None:
    if len(validations) < 2 or min(validations) != 0:
        return None
    before = rewards_by_prompt(session, validations[0])
    after = rewards_by_prompt(session, validations[max(validations)])
    gain = paired_bootstrap(before, after)
    return HeldOut(
        base=float(np.nanmean(before)),
        trained=float(np.nanmean(after)),
        low=gain.low,
        high=gain.high,
        prompts=before.shape[0],
        samples_per_prompt=before.shape[1],
    )


def _pairs(session: Session, validations: dict[int, ArtifactRef]) -> list[PicturePair]:
    """Return the first sample of the grid prompts, drawn by the base and by the trained policy."""
    if len(validations) < 2 or min(validations) != 0:
        return []
    samples = session.config.sampler.validation.samples_per_prompt
    first, last = 0, max(validations)
    drawn = {step: session.store.find(step, SAMPLES) for step in (first, last)}
    rewards = {step: rewards_by_prompt(session, validations[step])[:, 0].tolist() for step in (first, last)}
    pixels, prompts, seeds = {}, [], []
    for step, ref in drawn.items():
        if ref is None:
            return []
        pixels[step] = read_tensor(session.store.table(ref, "media"), columns.PIXELS).numpy()[::samples]
        prompts = session.store.table(ref, "prompts").column(columns.PROMPT).to_pylist()
        seeds = session.store.table(ref, "trajectories").column(columns.SEED).to_pylist()[::samples]
    count = min(session.config.tracking.grid_prompts, len(prompts))
    return [
        PicturePair(
            prompts[row],
            seeds[row],
            pixels[first][row],
            pixels[last][row],
            _number(rewards[first][row]),
            _number(rewards[last][row]),
        )
        for row in range(count)
    ]


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None
