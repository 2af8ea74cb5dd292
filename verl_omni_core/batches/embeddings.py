"""Sequences of different lengths: padded for transport, jagged for storage and training, padded locally at the model.

The transport form has one length for all samples, so that outputs of several workers concatenate without knowledge of
the model. Nothing is ever truncated: what does not fit is an error.

Axes: ``N`` rows, ``M`` transport length, ``L`` a row's own length, ``D`` width.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_omni_core.batches.batch import jagged
from verl_omni_core.errors import ContractError

if TYPE_CHECKING:
    from tensordict import TensorDict

EMBEDDINGS = ("prompt_embeds", "negative_prompt_embeds", "audio_prompt_embeds", "negative_audio_prompt_embeds")
CONDITIONS = ("condition_video_rows", "condition_audio_rows")


def pad_embeds(name: str, embeds_LD: Tensor, length: int, mask_L: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Pad one prompt's embedding to the transport length.

    Args:
        name: for messages.
        embeds_LD: [L, D].
        length: M.
        mask_L: [L] which positions are valid; none means all.
    Returns: the padded embedding [M, D] and its mask [M] bool.
    Raises:
        ContractError: L exceeds M, or the mask has another length.
    """
    if embeds_LD.ndim != 2:
        raise ContractError(f"{name} has shape {tuple(embeds_LD.shape)}, expected [length, width]")
    if embeds_LD.shape[0] > length:
        raise ContractError(
            f"{name} has {embeds_LD.shape[0]} positions, the limit is {length}; set the limit to the final "
            "length of all encoders together"
        )
    if mask_L is not None and mask_L.shape != embeds_LD.shape[:1]:
        raise ContractError(f"{name}: the mask has shape {tuple(mask_L.shape)} for {embeds_LD.shape[0]} positions")
    padded = embeds_LD.new_zeros(length, embeds_LD.shape[1])
    padded[: len(embeds_LD)] = embeds_LD
    mask = torch.zeros(length, dtype=torch.bool, device=embeds_LD.device)
    mask[: len(embeds_LD)] = True if mask_L is None else mask_L.bool()
    return padded, mask


def pad_condition_rows(sample: str, fields: Mapping[str, Any], length: int) -> dict[str, Tensor]:
    """Check a sample's reference rows and bring them into the transport form.

    Args:
        sample: id of the sample, for messages.
        fields: may hold ``condition_video_rows`` [R, D] with ``condition_video_row_count``, and the audio pair.
        length: M, the most rows that fit.
    Returns: for each pair given, the rows [M, D], ``..._row_count`` (int64 scalar) and ``..._rows_mask`` [M] bool.
    Raises:
        ContractError: one of a pair is missing; rows that are not a 2-D float tensor; a count that is no whole number,
            negative, over M, or not the number of rows.
    """
    padded: dict[str, Tensor] = {}
    for name in CONDITIONS:
        count_name = _count_name(name)
        rows, count = fields.get(name), fields.get(count_name)
        if rows is None and count is None:
            continue
        if rows is None or count is None:
            given, absent = (count_name, name) if rows is None else (name, count_name)
            raise ContractError(f"sample {sample}: {given} is given without {absent}; give both or neither")
        number = _whole_number(sample, count_name, count)
        if not isinstance(rows, Tensor) or rows.ndim != 2 or not rows.is_floating_point():
            seen = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
            raise ContractError(f"sample {sample}: {name} is {seen}, expected a floating-point tensor [rows, width]")
        if rows.shape[0] != number:
            raise ContractError(f"sample {sample}: {name} has {rows.shape[0]} rows, {count_name} says {number}")
        if number > length:
            raise ContractError(
                f"sample {sample}: {name} has {number} rows, at most {length} are allowed; raise "
                "max_prompt_embed_length, rows are never cut"
            )
        padded[name], padded[f"{name}_mask"] = pad_embeds(name, rows, length)
        padded[count_name] = torch.tensor(number, dtype=torch.int64)
    return padded


def embeds_padding_2_no_padding(batch: "TensorDict") -> "TensorDict":
    """Strip the transport padding: padded embeddings and reference rows become jagged.

    Args:
        batch: [N] with any of the prompt embeddings [N, M, D] (and ``<name>_mask`` [N, M]; without one all M positions
            are valid) and of the reference rows [N, M, D] with ``..._row_count`` [N] and ``..._rows_mask`` [N, M].
    Returns: a new batch in which each of them is a nested tensor [N, *, D]. Masks are dropped, as the lengths say the
        same; a prompt mask with holes stays, as a nested bool tensor [N, *], and the holes stay in the embedding.
        Counts and all other columns are kept as they are.
    Raises:
        ContractError: a mask of another shape; reference rows whose mask is no prefix, or differs from the count.
    """
    columns: dict[str, Any] = {key: batch.get(key) for key in batch.keys()}  # noqa: SIM118
    for name in EMBEDDINGS:
        if name in columns and not columns[name].is_nested:
            _strip_embedding(name, columns)
    for name in CONDITIONS:
        if name in columns and not columns[name].is_nested:
            _strip_condition(name, columns)
    from tensordict import TensorDict  # late, as in verl_omni_core.batches.batch

    return TensorDict(columns, batch_size=batch.batch_size)


def pad_to_longest(
    rows: Sequence[Tensor] | Tensor, *, multiple_of: int = 1, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Pad jagged rows to the longest of them, as model inputs of one micro-batch.

    Args:
        rows: N tensors [L_i, D], or a nested tensor of them; L_i may be 0.
        multiple_of: round the length up to a multiple, such as the degree of sequence parallelism.
        width: round the length up to at least this.
    Returns: zero-padded values [N, L, D] and their mask [N, L] bool.
    Raises:
        ContractError: no rows, or rows of different widths or dtypes.
    """
    parts = list(rows.unbind()) if isinstance(rows, Tensor) else list(rows)
    forms = {(part.dtype, tuple(part.shape[1:])) for part in parts}
    if len(forms) != 1:
        raise ContractError(
            f"rows have {len(forms)} different forms {sorted(map(str, forms))}; expected one dtype and width in a batch"
        )
    longest = max(width or 0, *(len(part) for part in parts))
    longest = -(-longest // multiple_of) * multiple_of
    padded = parts[0].new_zeros(len(parts), longest, *parts[0].shape[1:])
    mask = torch.zeros(len(parts), longest, dtype=torch.bool, device=padded.device)
    for index, part in enumerate(parts):
        padded[index, : len(part)] = part
        mask[index, : len(part)] = True
    return padded, mask


def _strip_embedding(name: str, columns: dict[str, Any]) -> None:
    embeds_NMD = columns[name]
    mask_NM = columns.pop(f"{name}_mask", None)
    if mask_NM is None:
        columns[name] = jagged(list(embeds_NMD))
        return
    if mask_NM.shape != embeds_NMD.shape[:2]:
        raise ContractError(f"{name}_mask has shape {tuple(mask_NM.shape)}, expected {tuple(embeds_NMD.shape[:2])}")
    mask_NM = mask_NM.bool()
    positions = torch.arange(1, mask_NM.shape[1] + 1, device=mask_NM.device)
    lengths_N = (mask_NM * positions).amax(dim=1) if mask_NM.shape[1] else mask_NM.sum(dim=1)
    lengths = lengths_N.tolist()
    columns[name] = jagged([row[:length] for row, length in zip(embeds_NMD, lengths, strict=True)])
    if not torch.equal(mask_NM.sum(dim=1), lengths_N):
        columns[f"{name}_mask"] = jagged([row[:length] for row, length in zip(mask_NM, lengths, strict=True)])


def _strip_condition(name: str, columns: dict[str, Any]) -> None:
    rows_NMD = columns[name]
    count_N, mask_NM = columns.get(_count_name(name)), columns.pop(f"{name}_mask", None)
    if count_N is None or mask_NM is None:
        lost = _count_name(name) if count_N is None else f"{name}_mask"
        raise ContractError(f"{name} came without {lost}; the transport form has rows, count and mask")
    if mask_NM.shape != rows_NMD.shape[:2]:
        raise ContractError(f"{name}_mask has shape {tuple(mask_NM.shape)}, expected {tuple(rows_NMD.shape[:2])}")
    counts = count_N.reshape(-1).tolist()
    for index, count in enumerate(counts):
        mask = mask_NM[index].bool()
        if int(mask.sum()) != count:
            raise ContractError(f"row {index}: {name}_mask marks {int(mask.sum())} rows, the count says {count}")
        if not bool(mask[:count].all()):
            raise ContractError(f"row {index}: {name}_mask has holes; expected the first {count} positions")
    columns[name] = jagged([row[:count] for row, count in zip(rows_NMD, counts, strict=True)])


def _count_name(name: str) -> str:
    return f"{name.removesuffix('s')}_count"


def _whole_number(sample: str, name: str, value: Any) -> int:
    if isinstance(value, Tensor) and (value.ndim or value.is_floating_point() or value.dtype == torch.bool):
        raise ContractError(f"sample {sample}: {name} is {value.dtype} {tuple(value.shape)}, expected a whole number")
    try:
        number = int(value) if isinstance(value, Tensor) else operator.index(value)
    except TypeError:
        raise ContractError(f"sample {sample}: {name} is {value!r}, expected a whole number") from None
    if number < 0 or isinstance(value, bool):
        raise ContractError(f"sample {sample}: {name} is {value!r}, expected a whole number of at least 0")
    return number
