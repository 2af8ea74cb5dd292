"""A step's committed tables, read by one rank: its own rows, and the embeddings of their prompts once each.

Axes: ``R`` rows of this rank, ``W`` stored steps, ``P`` prompts of these rows.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
from tensordict import TensorDict
from torch import Tensor

from verl_omni_core.batches import columns
from verl_omni_core.batches.tables import read_jagged, read_tensor
from verl_omni_core.errors import ContractError
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.training.micro_batches import share

_PER_STEP = (columns.STEP_INDICES, columns.ALL_TIMESTEPS, columns.ROLLOUT_LOG_PROBS)


class StepRows:
    """The rows that a training step can read. Tables stay memory-mapped; a batch copies what its rank needs."""

    def __init__(
        self,
        store: RunStore,
        rollout: ArtifactRef,
        *,
        conditioning: Sequence[str],
        pack_size: int,
        advantages: ArtifactRef | None = None,
        old_log_probs: ArtifactRef | None = None,
        reference: ArtifactRef | None = None,
    ) -> None:
        """Open the tables.

        Args:
            conditioning: names of the model's conditioning that may be stored, ``negative_*`` among them.
            pack_size: samples of a pack, by which rows are kept together in deterministic mode.
        Raises:
            StoreError: a table is missing or damaged.
        """
        self.trajectories = store.table(rollout, "trajectories")
        self._embeddings = store.table(rollout, "embeddings")
        self._names = [name for name in conditioning if name in self._embeddings.column_names]
        self._pack_size = pack_size
        self._place = _places(self.trajectories)
        self._extra = [
            (store.table(ref, table), tuple(names))
            for ref, table, names in (
                (old_log_probs, "logprobs", (columns.OLD_LOG_PROBS,)),
                (reference, "reference", (columns.REF_PREV_SAMPLE_MEAN, columns.REF_LOG_PROB)),
            )
            if ref is not None
        ]
        self._advantages = store.table(advantages, "advantages") if advantages is not None else None
        self._advantage_place: dict[int, int] = {}
        self._valid: list[bool] = []
        if self._advantages is not None:
            self._advantage_place = _places(self._advantages)
            has_valid = columns.VALID in self._advantages.column_names
            valid = self._advantages[columns.VALID].to_pylist() if has_valid else [True] * self._advantages.num_rows
            self._valid = valid
        keys = self._embeddings[columns.PROMPT_KEY].to_pylist()
        self._embedding_place = {key: place for place, key in reversed(list(enumerate(keys)))}

    @property
    def sample_indices(self) -> list[int]:
        """All samples that have a trajectory, in order."""
        return list(self._place)

    @property
    def versions(self) -> set[int]:
        """Policy versions that drew the samples."""
        names = (columns.MIN_VERSION, columns.MAX_VERSION)
        return {version for name in names for version in self.trajectories[name].unique().to_pylist()}

    def batch(self, indices: Sequence[int], rank: int = 0, ranks: int = 1) -> TensorDict:
        """Return this rank's share of some samples, in the form of :mod:`verl_omni_core.training.ppo_engine`.

        Samples that failed or are not valid are left out before rows are shared. A rank without a row gets one of
        weight 0.

        Args:
            indices: of all ranks.
        Raises:
            ContractError: a sample without an advantage, or one without embeddings.
        """
        counted = [index for index in indices if index in self._place and self._is_valid(index)]
        mine = share(counted, rank, ranks)
        rows = mine or counted[:1] or list(self._place)[:1]
        places = [self._place[index] for index in rows]
        per_step = {
            name: _take(self.trajectories, name, places) for name in _PER_STEP if name in self.trajectories.column_names
        }
        if columns.ROLLOUT_LOG_PROBS in per_step:
            per_step[columns.OLD_LOG_PROBS] = per_step[columns.ROLLOUT_LOG_PROBS]
        for table, names in self._extra:
            found = _places(table)
            for name in names:
                if name in table.column_names:
                    per_step[name] = _take(table, name, [_place_of(found, index, name) for index in rows])
        prompt_index, conditioning = self._conditioning(places)
        values: dict[str, Tensor | TensorDict] = {
            "sample_index": torch.tensor(rows),
            "weight": torch.full((len(rows),), float(bool(mine))),
            "pack": torch.tensor(rows) // self._pack_size,
            "prompt_index": prompt_index,
            columns.ALL_LATENTS: _take(self.trajectories, columns.ALL_LATENTS, places),
        }
        if self._advantages is not None:
            self._add_advantages(rows, values, per_step)
        width = per_step[columns.STEP_INDICES].shape[1]
        values["steps"] = TensorDict(per_step, [len(rows), width])
        return TensorDict({"rows": TensorDict(values, [len(rows)]), "conditioning": conditioning}, [])

    def _is_valid(self, index: int) -> bool:
        if self._advantages is None:
            return True
        return self._valid[_place_of(self._advantage_place, index, columns.ADVANTAGE)]

    def _add_advantages(self, rows: list[int], values: dict, per_step: dict) -> None:
        table = self._advantages
        assert table is not None
        places = [self._advantage_place.get(index, 0) for index in rows]  # a row of weight 0 may have none
        column = torch.from_numpy(np.array(table[columns.ADVANTAGE].to_numpy(), dtype=np.float32))
        values["advantages"] = torch.where(values["weight"] > 0, column[places], 0.0)
        if "is_weights" in table.column_names:
            per_step["rollout_is_weights"] = _take(table, "is_weights", places)

    def _conditioning(self, places: list[int]) -> tuple[Tensor, TensorDict]:
        all_keys = self.trajectories[columns.PROMPT_KEY]
        keys = [all_keys[place].as_py() for place in places]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        missing = sorted(set(keys) - set(self._embedding_place))
        if missing:
            raise ContractError(f"the rollout has no embeddings of prompts {missing[:3]}; its shards are incomplete")
        tensors = {name: self._stacked(name, list(numbers)) for name in self._names}
        return torch.tensor([numbers[key] for key in keys]), TensorDict(tensors, [len(numbers)])

    def _stacked(self, name: str, keys: list[str]) -> Tensor:
        rows = []
        for key in keys:
            one = self._embeddings.slice(self._embedding_place[key], 1)
            # a fixed-shape column has no list type, jagged ones do
            is_jagged = pa.types.is_large_list(one.schema.field(name).type)
            value = read_jagged(one, name)[0] if is_jagged else read_tensor(one, name)[0]
            if value is None:
                raise ContractError(f"prompt {key} has no {name}, but others have; draw all samples with one guidance")
            rows.append(value)
        shapes = sorted({tuple(row.shape) for row in rows})
        if len(shapes) > 1:
            raise ContractError(f"{name} has shapes {shapes} in one batch; this model needs embeddings of one length")
        return torch.stack(rows)


def _places(table: pa.Table) -> dict[int, int]:
    return {index: place for place, index in enumerate(table[columns.SAMPLE_INDEX].to_pylist())}


def _place_of(places: dict[int, int], index: int, what: str) -> int:
    if index not in places:
        raise ContractError(f"sample {index} has a trajectory but no {what}; the stage between them was cut short")
    return places[index]


def _take(table: pa.Table, name: str, places: list[int]) -> Tensor:
    """Copy rows of a tensor column, run by run: a row is never copied twice, and nothing else is read."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    parts = [read_tensor(table.slice(run[0], len(run)), name) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
