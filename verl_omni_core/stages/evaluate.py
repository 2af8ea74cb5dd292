"""Judge trained weights or a base model on held-out prompts, through the engine, with no trainer.

An evaluation is a run of its own. What it judges stands under the step of the weights, a base under step 0.
"""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl_omni_core.errors import StoreError
from verl_omni_core.metrics.validation import prompt_statistics
from verl_omni_core.report.images import before_after, image_grid, write_picture
from verl_omni_core.settings.check import check
from verl_omni_core.stages import comparison
from verl_omni_core.stages.ending import end_on_failure
from verl_omni_core.stages.finish import PICTURE, close
from verl_omni_core.stages.keys import stage_key
from verl_omni_core.stages.observe import stage
from verl_omni_core.stages.opening import store_of, this_process
from verl_omni_core.stages.session import RunRef, Session, register, session_of
from verl_omni_core.stages.subjects import Evaluation, Subject
from verl_omni_core.stages.validate import SAMPLES, STAGE, draw_with, held_out, rewards_by_prompt, score_held_out
from verl_omni_core.store import runs
from verl_omni_core.store.durable_files import link_or_copy
from verl_omni_core.store.lease import take_ownership
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.version import __version__
from verl_omni_core.weights.checksum import checksum
from verl_omni_core.weights.filesystem import read_update
from verl_omni_core.workers.actors import Actors

WEIGHTS, RESULT = "weights", "evaluation"
RECORD = "evaluation.json"
_FILES = {
    "lora": ("adapter_model.safetensors", "adapter_config.json"),
    "full": ("diffusion_pytorch_model.safetensors",),
}
_FULL_REWARD = 1e-6  # a sum of weighted scores rounds


@dataclass(frozen=True)
class Judged:
    """One subject's held-out rewards. Statistics are of a prompt's samples, averaged over prompts."""

    label: str
    step: int
    mean: float
    std: float | None
    best: dict[int, float]
    """k to the mean best of k samples."""
    worst: dict[int, float]
    exact: float | None
    """Share of samples with the largest reward there is; none where there is no largest one."""
    invalid: float
    """Share of samples without a score."""
    prompts: int
    samples_per_prompt: int


@dataclass(frozen=True)
class EvaluationResult:
    """The numbers of an evaluation."""

    run_id: str
    """Of the evaluation itself."""
    folder: str
    title: str
    judged: tuple[Judged, ...]
    gain: dict[str, float] | None
    """``mean``, ``low`` and ``high`` of the last subject over the base, paired bootstrap, 95 %."""
    picture: str
    seconds_per_subject: dict[int, float] = field(compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-like values."""
        return asdict(self)


def open_evaluation(evaluation: Evaluation) -> RunRef:
    """Make the evaluation's run folder, own it, start its actors and commit the weights of its subjects."""
    config = evaluation.config
    check(config, splits=("validation",))
    folder = runs.create_run(
        config.run.store,
        config.model_dump(mode="json"),
        code_version=__version__,
        run_id=config.run.id,
        kind=runs.EVALUATE,
    )
    ownership = take_ownership(folder.root, this_process())
    ref = RunRef(str(folder.root), ownership.epoch)
    try:
        with end_on_failure(ref, config.cluster):
            folder.write_progress(status="running", step=0)
            actors = Actors.start_or_find(config, folder, ref.epoch, trains=False)
            session = register(Session(ref, config, store_of(ref, config), actors, ownership))
            for subject in evaluation.subjects:
                if subject.folder is not None:
                    _take_over(session, subject, Path(subject.folder))
            return ref
    except BaseException:
        ownership.release()
        raise


@stage(STAGE)
def judge(run: RunRef, step: int) -> ArtifactRef:
    """Commit held-out samples, rewards and metrics of the weights that stand under ``step``."""
    session = session_of(run)
    weights = session.store.find(step, WEIGHTS)
    prompts, requests = held_out(session, session.validation_prompts.num_rows, version=step)
    samples = draw_with(session, SAMPLES, step, weights, prompts, requests)
    return score_held_out(session, step, samples, prompts)


def finish_evaluation(run: RunRef, evaluation: Evaluation) -> EvaluationResult:
    """Commit the result, draw its picture, and end the evaluation's actors."""
    session = session_of(run)
    refs = comparison.artifacts(session, STAGE)
    labels = {subject.step: subject.label for subject in evaluation.subjects}
    largest = _largest_reward(session)
    judged = tuple(
        judged_rewards(rewards_by_prompt(session, ref), labels[step], step, largest) for step, ref in refs.items()
    )
    compared = comparison.held_out(session)
    result = EvaluationResult(
        run_id=session.root.name,
        folder=str(session.root),
        title=evaluation.title,
        judged=judged,
        gain=None if compared is None else {"mean": compared.gain, "low": compared.low, "high": compared.high},
        picture=_picture(session),
        seconds_per_subject={step: session.spans.get(step, {}).get(STAGE, math.nan) for step in refs},
    )
    _commit(session, result, list(refs.values()))
    session.folder().write_engines(session.actors.describe_engines())
    session.folder().write_progress(status="finished", step=0, reward=judged[-1].mean)
    close(session)
    return result


def judged_rewards(rewards_PG: np.ndarray, label: str, step: int, largest: float) -> Judged:
    """Return the statistics of held-out rewards.

    Args:
        rewards_PG: [P prompts, G samples], nan where a score is missing.
        largest: reward that cannot be exceeded; infinite if there is none.
    Raises:
        StoreError: no sample has a score.
    """
    statistics = prompt_statistics(rewards_PG)
    prompts, samples = rewards_PG.shape
    if not statistics:
        raise StoreError(f"none of {rewards_PG.size} held-out samples of {label} has a score, so there is no result")
    scored = rewards_PG[np.isfinite(rewards_PG)]

    def extremes(name: str) -> dict[int, float]:
        found = {key: value for key, value in statistics.items() if key.startswith(f"{name}@") and "/mean" in key}
        return {int(key.split("@")[1].split("/")[0]): value for key, value in found.items()}

    return Judged(
        label=label,
        step=step,
        mean=statistics[f"mean@{samples}"],
        std=statistics.get(f"std@{samples}"),
        best=extremes("best"),
        worst=extremes("worst"),
        exact=float((scored >= largest - _FULL_REWARD).mean()) if math.isfinite(largest) else None,
        invalid=1 - scored.size / rewards_PG.size,
        prompts=prompts,
        samples_per_prompt=samples,
    )


def _take_over(session: Session, subject: Subject, folder: Path) -> ArtifactRef:
    """Commit a subject's weights as the evaluation's own, so that its result needs no other folder."""
    update = read_update(folder, subject.step)
    seen = checksum(update.tensors)
    attempt = session.store.attempt(
        subject.step, WEIGHTS, stage_key(WEIGHTS, subject.step, [], checksum=seen), weights_version=subject.step
    )
    names = [name for name in os.listdir(folder) if name in _FILES[update.kind]]
    for name in names:
        link_or_copy(folder / name, attempt.folder / name)
    producer = session.producer(
        weights_version=subject.step, kind=update.kind, checksum=seen, label=subject.label, source=str(folder)
    )
    return attempt.commit(
        [attempt.add_file(name) for name in sorted(names)], rows=len(update.tensors), parents=[], producer=producer
    )


def _largest_reward(session: Session) -> float:
    ranges = session.actors.scorer_ranges()
    # a negative weight turns the least score into the best
    return sum(s.weight * ranges[s.name][1 if s.weight > 0 else 0] for s in session.config.reward.scorers if s.weight)


def _picture(session: Session) -> str:
    count = session.config.tracking.grid_prompts
    pairs = comparison.picture_pairs(session, count)
    if pairs:
        return str(write_picture(session.root / PICTURE, before_after(pairs)))
    drawn = comparison.first_samples(session, max(comparison.artifacts(session, STAGE)), count)
    grid = image_grid(drawn.pixels, drawn.prompts, drawn.rewards)
    return str(write_picture(session.root / "images" / "held_out.png", grid))


def _commit(session: Session, result: EvaluationResult, parents: list[ArtifactRef]) -> None:
    step = result.judged[-1].step
    key = stage_key(RESULT, step, parents)
    if session.store.committed(step, RESULT, key) is not None:
        return
    attempt = session.store.attempt(step, RESULT, key, parents=parents)
    data = json.dumps(result.to_json(), indent=2).encode()
    attempt.commit(
        [attempt.write_file(RECORD, data)], rows=len(result.judged), parents=parents, producer=session.producer()
    )
