"""Two policies on the same held-out prompts and seeds: what changed, in numbers and pictures."""

import logging
from dataclasses import dataclass

import numpy as np

from verl_omni_core.batches import columns
from verl_omni_core.batches.tables import read_tensor
from verl_omni_core.errors import StoreError
from verl_omni_core.metrics.validation import paired_bootstrap
from verl_omni_core.report.images import PicturePair
from verl_omni_core.report.summary import HeldOut
from verl_omni_core.stages.session import Session
from verl_omni_core.stages.validate import SAMPLES, STAGE, rewards_by_prompt
from verl_omni_core.store.manifest import ArtifactRef

logger = logging.getLogger(__name__)


def artifacts(session: Session, stage: str) -> dict[int, ArtifactRef]:
    """Return a stage's committed artifacts by step, in order."""
    found = {step: session.store.find(step, stage) for step in session.store.steps()}
    return {step: ref for step, ref in found.items() if ref is not None}


def held_out(session: Session) -> HeldOut | None:
    """Return the rewards of the first and the last judged policy.

    None if the base or a later one was not judged, or if they were judged on different prompts.
    """
    validations = artifacts(session, STAGE)
    if not _are_paired(session, validations):
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


@dataclass(frozen=True)
class FirstSamples:
    """The first sample of held-out prompts, drawn by one policy."""

    pixels: np.ndarray
    """uint8 [N, 3, H, W]."""
    prompts: list[str]
    seeds: list[int]
    rewards: list[float | None]


def first_samples(session: Session, step: int, count: int) -> FirstSamples:
    """Return the first sample of the first ``count`` held-out prompts, as validation after ``step`` drew them.

    Raises:
        StoreError: there was no validation after that step.
    """
    drawn, judged = session.store.find(step, SAMPLES), session.store.find(step, STAGE)
    if drawn is None or judged is None:
        raise StoreError(
            f"run {session.root.name} has no validation after step {step}, so there are no samples to show"
        )
    every = session.config.sampler.validation.samples_per_prompt
    rewards = rewards_by_prompt(session, judged)[:count, 0].tolist()
    return FirstSamples(
        pixels=read_tensor(session.store.table(drawn, "media"), columns.PIXELS).numpy()[::every][:count],
        prompts=session.store.table(drawn, "prompts").column(columns.PROMPT).to_pylist()[:count],
        seeds=session.store.table(drawn, "trajectories").column(columns.SEED).to_pylist()[::every][:count],
        rewards=[reward if np.isfinite(reward) else None for reward in rewards],
    )


def picture_pairs(session: Session, count: int) -> list[PicturePair]:
    """Return the first sample of the first ``count`` held-out prompts, drawn by the base and by the last policy.

    None where :func:`held_out` has none.
    """
    validations = artifacts(session, STAGE)
    if not _are_paired(session, validations):
        return []
    before, after = (first_samples(session, step, count) for step in (0, max(validations)))
    return [
        PicturePair(prompt, seed, *pictures)
        for prompt, seed, *pictures in zip(
            before.prompts, before.seeds, before.pixels, after.pixels, before.rewards, after.rewards, strict=True
        )
    ]


def _are_paired(session: Session, validations: dict[int, ArtifactRef]) -> bool:
    if len(validations) < 2 or min(validations) != 0:
        return False
    last = max(validations)
    if _prompt_keys(session, 0) == _prompt_keys(session, last):
        return True
    logger.warning(
        "run %s: the validations before training and after step %d drew different prompts, so they are not compared; "
        "the held-out prompts changed under the run",
        *(session.root.name, last),
    )
    return False


def _prompt_keys(session: Session, step: int) -> list[str]:
    drawn = session.store.find(step, SAMPLES)
    if drawn is None:
        raise StoreError(f"run {session.root.name} has a validation of step {step} without its samples")
    keys: list[str] = session.store.table(drawn, "prompts").column(columns.PROMPT_KEY).to_pylist()
    return keys
