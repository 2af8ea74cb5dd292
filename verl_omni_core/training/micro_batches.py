"""Cutting a mini-batch into forward passes.

A row of a forward pass is one stored step of one sample; ``training.micro_batch`` bounds the rows. Passes go step by
step through a block of samples. Without need for bit-equality, short blocks are filled up with further steps.
"""

from collections.abc import Sequence
from typing import TypeVar

from verl_omni_core.errors import ConfigError

T = TypeVar("T")
Pair = tuple[int, int]
"""(position of the sample, number of its stored step)."""


def forward_passes(
    samples: Sequence[int],
    steps: int,
    micro_batch: int,
    *,
    packs: Sequence[int] | None = None,
    mix_steps: bool = True,
) -> list[list[Pair]]:
    """Return the (sample, step) pairs of every forward pass; each pair occurs once.

    Args:
        samples: positions in the batch, in order.
        steps: stored steps a sample.
        micro_batch: most pairs in a pass.
        packs: the pack of each of ``samples``. Given: no pass holds samples of two packs, so that a pass can have the
            shape in which an engine computed the pack, and then its log-probs to the last bit.
        mix_steps: whether a pass may hold several steps.
    """
    if micro_batch < 1:
        raise ConfigError(f"training.micro_batch is {micro_batch}; use 1 or more")
    passes = []
    for block in _blocks(samples, packs, micro_batch):
        columns = [[(sample, step) for sample in block] for step in range(steps)]
        if mix_steps:
            passes += chunks([pair for column in columns for pair in column], micro_batch)
        else:
            passes += columns
    return passes


def chunks(items: Sequence[T], size: int) -> list[list[T]]:
    """Cut ``items`` into runs of ``size``; the last may be shorter."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def share(items: Sequence[T], rank: int, size: int) -> list[T]:
    """Return the contiguous part of ``items`` that is this rank's; parts differ by at most one item."""
    return list(items[len(items) * rank // size : len(items) * (rank + 1) // size])


def _blocks(samples: Sequence[int], packs: Sequence[int] | None, micro_batch: int) -> list[list[int]]:
    if packs is None:
        return chunks(samples, micro_batch)
    by_pack: dict[int, list[int]] = {}
    for sample, pack in zip(samples, packs, strict=True):
        by_pack.setdefault(pack, []).append(sample)
    return [block for members in by_pack.values() for block in chunks(members, micro_batch)]
