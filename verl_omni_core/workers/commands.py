"""What a driver says to the trainer's ranks and what they answer. All of it pickles; tensors stay in the store."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from verl_omni_core.identity import digest
from verl_omni_core.rollout._contract import SamplingParams
from verl_omni_core.store.attempt import Attempt
from verl_omni_core.store.manifest import ArtifactRef, FileRecord

CONTROL = "control"
"""Concurrency group of what a rank answers while it computes."""

CONTROL = "control"
"""Concurrency group of what a rank answers while it computes."""


@dataclass(frozen=True)
class UpdateCommand:
    """All optimizer steps of one training step. Sent twice it is applied once."""

    root: str
    """The run's folder."""
    step: int
    """1-based; the policy version that the update makes."""
    epoch: int
    """Fence epoch of who commands."""
    expected_version: int
    """The policy version that is to be updated: ``step - 1``."""
    rollout: ArtifactRef
    """Holds ``trajectories`` and ``embeddings``."""
    advantages: ArtifactRef
    """Holds ``advantages``; rows whose ``valid`` is false take no part."""
    old_log_probs: ArtifactRef | None
    """Holds ``logprobs``; none takes the engine's own log-probs."""
    reference: ArtifactRef | None
    """Holds ``reference``."""
    mini_batches: list[list[int]]
    """Sample indices of every optimizer step, in order."""

    def update_id(self, number: int) -> str:
        """Return the identity of optimizer step ``number`` of the step, counted from 0."""
        return f"{self.step:06d}/{number:04d}"

    def batch_digest(self, number: int) -> str:
        """Return the digest of what optimizer step ``number`` reads."""
        refs = [self.rollout, self.advantages, self.old_log_probs, self.reference]
        tables = [ref and ref.manifest_sha256 for ref in refs]
        return digest({"tables": tables, "rows": self.mini_batches[number]})


@dataclass(frozen=True)
class UpdateResult:
    """What an update did; the same for every delivery of its command."""

    step: int
    version: int
    """Policy version after it."""
    metrics: dict[str, float]
    """By the names of ``actor/*``, each reduced over all rows of all optimizer steps as ``metrics.names`` declares."""
    records: list[dict[str, Any]]
    """One ledger record an optimizer step: the columns of the ``updates`` table, without those that the ledger adds."""
    skipped: int
    """Optimizer steps that moved nothing."""
    ratio_deviation: float | None
    """Largest ``|ratio - 1|`` of the first mini-batch that has rows and finite log-probs; none if none has."""
    seconds: float
    replayed: bool = field(default=False, compare=False)
    """The command had been applied before; nothing was computed."""


@dataclass(frozen=True)
class InferCommand:
    """Score all stored samples of a step and write the result into an attempt, one shard a rank."""

    attempt: Attempt
    rollout: ArtifactRef
    expected_version: int
    """Policy version that must score: the one that drew the samples."""


@dataclass(frozen=True)
class WrittenWeights:
    """A policy version in a folder, as ``weights.filesystem`` reads it."""

    version: int
    kind: str
    """``lora`` or ``full``."""
    tensor_count: int
    checksum: str
    """See :func:`verl_omni_core.weights.checksum.checksum`; of the tensors by names without a prefix."""
    files: list[str]
    """Relative to the folder."""
    peft_config: Mapping[str, Any] | None


@dataclass(frozen=True)
class WrittenSnapshot:
    """All that training goes on from, on the disk and read back."""

    files: list[FileRecord]
    seconds: float
    """From the moment of the copy."""


@dataclass(frozen=True)
class ProbeCommand:
    """One sample that the trainer is to draw itself, to compare with a replica's."""

    seed: int
    sampling: SamplingParams
    conditioning: Mapping[str, Tensor]
    """Of the prompt, as the replica returned it; the trainer has no text encoder."""
    network: str = "policy"


@dataclass(frozen=True)
class RankState:
    """How a rank stands; answered also while it computes."""

    rank: int
    pid: int
    ready: bool
    version: int
    epoch: int
    """Highest fence epoch seen."""
