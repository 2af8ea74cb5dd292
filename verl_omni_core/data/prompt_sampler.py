"""Which prompts a step sees: a pure function of seed and step, so there is no position to save or to lose."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_STREAM = 0x70726F6D  # keeps these orders apart from other streams of the same seed


@dataclass(frozen=True)
class PromptDraw:
    """One prompt of a step."""

    dataset_row: int
    epoch: int
    """Passes over the data set that ended before this draw."""
    occurrence: int
    """How often the same row came earlier in the same step; greater than 0 only if a step spans an epoch's end."""


def rows_of_step(
    seed: int, step: int, *, dataset_rows: int, prompts_per_step: int, shuffle: bool = True
) -> list[PromptDraw]:
    """Return the prompts of a step, in order.

    The epochs follow each other in one endless stream, of which every step takes the next ``prompts_per_step``: each
    row comes once an epoch, and a step may straddle the end of one.

    Args:
        seed: ``run.seed``.
        step: 1-based training step.
        dataset_rows: rows of the data set.
        prompts_per_step: rows to draw.
        shuffle: a new random order each epoch, else the file's order.
    Raises:
        ValueError: an argument below its minimum.
    """
    if step < 1 or dataset_rows < 1 or prompts_per_step < 1 or seed < 0:
        raise ValueError(
            f"got seed {seed}, step {step}, {dataset_rows} rows and {prompts_per_step} prompts a step; the seed "
            "must be at least 0, the others at least 1"
        )
    seen: Counter[int] = Counter()
    draws = []
    for position in range((step - 1) * prompts_per_step, step * prompts_per_step):
        epoch, place = divmod(position, dataset_rows)
        row = int(epoch_order(seed, epoch, dataset_rows)[place]) if shuffle else place
        draws.append(PromptDraw(row, epoch, seen[row]))
        seen[row] += 1
    return draws


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, dataset_rows: int) -> np.ndarray:
    """Return the order of the rows in an epoch, [dataset_rows] int64, read-only.

    The rows are sorted by raw words of a PCG64 stream. numpy promises that these words never change, which it does not
    promise of its own permutation.
    """
    words = np.random.PCG64(np.random.SeedSequence([_STREAM, seed, epoch])).random_raw(dataset_rows)
    order = np.argsort(words, kind="stable")
    order.flags.writeable = False
    return order
