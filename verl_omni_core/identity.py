"""Derived identity: every seed and every name follows from the run's seed, the step and the position in it.

Nothing here is drawn, and the run id never enters a seed: two runs with one seed agree, on any number of workers.
"""

import hashlib
import json
from typing import Any

SEED_MODULUS = 2**63 - 1
SEED_STRIDE = 1_000_003


def sample_seed(run_seed: int, step: int, sample_index: int) -> int:
    """Return the generator seed of a sample: ``((run_seed + step - 1) * 1000003 + sample_index) mod (2^63 - 1)``.

    Args:
        run_seed: ``run.seed``.
        step: 1-based training step.
        sample_index: position in the step, prompt-major; independent of workers and packs.
    """
    return ((run_seed + step - 1) * SEED_STRIDE + sample_index) % SEED_MODULUS


def refill_seed(run_seed: int, step: int, sample_index: int, refill: int) -> int:
    """Return the seed of a sample that is drawn in place of one that failed for good.

    Args:
        run_seed, step, sample_index: as for :func:`sample_seed`.
        refill: 1 for the first replacement.
    """
    place = {"run_seed": run_seed, "step": step, "sample_index": sample_index, "refill": refill}
    return int(digest(place)[:16], 16) % SEED_MODULUS


def group_uid(step: int, dataset_row: int, occurrence: int) -> str:
    """Return the id of a prompt's group in a step; ``occurrence`` tells repeated rows of one step apart."""
    return f"s{step:06d}-r{dataset_row:06d}-{occurrence}"


def sample_id(uid: str, session: int) -> str:
    """Return the id of one sample of a group, unique in a run."""
    return f"{uid}-g{session:03d}"


def digest(value: Any) -> str:
    """Return the sha256 of a JSON-like value with sorted keys: equal values, equal digests."""
    encoded = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=str)
    return hashlib.sha256(encoded.encode()).hexdigest()
