"""Padding for transport and jagged rows for training lose nothing and accept nothing wrong."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from verl_omni_core.batches.batch import DataProto
from verl_omni_core.batches.embeddings import (
    embeds_padding_2_no_padding,
    pad_condition_rows,
    pad_embeds,
    pad_to_longest,
)
from verl_omni_core.errors import ContractError

LIMIT = 6


def fields(video: int | None = None, audio: int | None = None, width: int = 3) -> dict:
    values = {}
    if video is not None:
        values |= {"condition_video_rows": torch.randn(video, width), "condition_video_row_count": video}
    if audio is not None:
        values |= {"condition_audio_rows": torch.randn(audio, 2), "condition_audio_row_count": torch.tensor(audio)}
    return values


def stacked(samples: list[dict]) -> DataProto:
    return DataProto.from_dict({key: torch.stack([sample[key] for sample in samples]) for key in samples[0]})


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, LIMIT), st.integers(0, LIMIT)), min_size=3, max_size=9))
def test_reference_rows_survive_transport_three_workers_and_local_padding(counts):
    raw = [fields(video, audio) for video, audio in counts]
    padded = [pad_condition_rows(str(i), values, LIMIT) for i, values in enumerate(raw)]
    workers = [stacked(padded[:1]), stacked(padded[1:2]), stacked(padded[2:])]
    batch = embeds_padding_2_no_padding(DataProto.concat(workers).batch)
    for name in ("condition_video_rows", "condition_audio_rows"):
        rows = batch[name].unbind()
        assert all(torch.equal(row, values[name]) for row, values in zip(rows, raw, strict=True))
        local, mask = pad_to_longest(batch[name])
        assert local.shape[1] == max(len(row) for row in rows)
        assert mask.sum(dim=1).tolist() == [len(row) for row in rows]
        assert all(torch.equal(local[i, : len(row)], row) for i, row in enumerate(rows))
        assert f"{name}_mask" not in batch.keys()  # noqa: SIM118


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, LIMIT), min_size=1, max_size=6), st.sampled_from([torch.float32, torch.bfloat16]))
def test_prompt_embeddings_survive_padding_and_its_removal(lengths, dtype):
    raw = [torch.randn(n, 4).to(dtype) for n in lengths]
    padded = [
        dict(zip(("prompt_embeds", "prompt_embeds_mask"), pad_embeds("p", row, LIMIT), strict=True)) for row in raw
    ]
    batch = embeds_padding_2_no_padding(stacked(padded).batch)
    assert all(torch.equal(a, b) for a, b in zip(batch["prompt_embeds"].unbind(), raw, strict=True))
    assert "prompt_embeds_mask" not in batch.keys()  # noqa: SIM118


def test_without_a_mask_the_whole_sequence_is_valid():
    batch = DataProto.from_dict({"negative_prompt_embeds": torch.ones(2, 5, 3)}).batch
    assert [len(row) for row in embeds_padding_2_no_padding(batch)["negative_prompt_embeds"].unbind()] == [5, 5]


def test_a_prompt_mask_with_holes_is_kept_beside_the_rows():
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0]])
    batch = DataProto.from_dict({"prompt_embeds": torch.ones(2, 4, 3), "prompt_embeds_mask": mask}).batch
    stripped = embeds_padding_2_no_padding(batch)
    assert [len(row) for row in stripped["prompt_embeds"].unbind()] == [3, 2]
    assert [row.tolist() for row in stripped["prompt_embeds_mask"].unbind()] == [[True, False, True], [True, True]]


def test_removing_padding_twice_changes_nothing_and_other_columns_are_kept():
    batch = DataProto.from_dict({"prompt_embeds": torch.ones(2, 4, 3), "x": torch.ones(2)}).batch
    once = embeds_padding_2_no_padding(batch)
    twice = embeds_padding_2_no_padding(once)
    assert torch.equal(twice["prompt_embeds"].values(), once["prompt_embeds"].values())
    assert twice["x"].tolist() == [1, 1]


def test_exactly_the_limit_fits_and_one_more_raises():
    assert pad_condition_rows("s", fields(LIMIT), LIMIT)["condition_video_rows_mask"].all()
    with pytest.raises(ContractError, match=r"sample s: condition_video_rows has 7 rows, at most 6"):
        pad_condition_rows("s", fields(LIMIT + 1), LIMIT)
    with pytest.raises(ContractError, match=r"7 positions, the limit is 6; set the limit to the final length"):
        pad_embeds("prompt_embeds", torch.zeros(7, 2), LIMIT)


def test_no_reference_rows_at_all_are_legal():
    assert pad_condition_rows("s", {}, LIMIT) == {}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"condition_video_row_count": None}, "without condition_video_row_count"),
        ({"condition_video_rows": None}, "without condition_video_rows"),
        ({"condition_video_row_count": 1}, "has 2 rows, condition_video_row_count says 1"),
        ({"condition_video_row_count": -1}, "-1, expected a whole number of at least 0"),
        ({"condition_video_row_count": 2.0}, "2.0, expected a whole number"),
        ({"condition_video_row_count": True}, "True, expected a whole number"),
        ({"condition_video_row_count": torch.tensor([2])}, r"int64 \(1,\), expected a whole number"),
        ({"condition_video_rows": torch.zeros(2, 3).int()}, "int32"),
        ({"condition_video_rows": torch.zeros(2)}, r"\(2,\)"),
        ({"condition_video_rows": [[0.0]]}, "list"),
    ],
)
def test_wrong_reference_rows_are_refused_with_sample_and_field(changes, says):
    with pytest.raises(ContractError, match=says) as caught:
        pad_condition_rows("step-1", {**fields(2), **changes}, LIMIT)
    assert "sample step-1" in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda d: d["condition_video_rows_mask"].__setitem__((1, 0), False), "marks 1 rows, the count says 2"),
        (lambda d: d["condition_video_rows_mask"][1].copy_(torch.tensor([0, 1, 1, 0, 0, 0])), "has holes"),
        (lambda d: d["condition_video_row_count"].__setitem__(0, 3), "the count says 3"),
        (lambda d: d.pop("condition_video_rows_mask"), "without condition_video_rows_mask"),
        (lambda d: d.update(condition_video_rows_mask=torch.ones(2, 5)), "has shape"),
    ],
)
def test_a_corrupted_mask_or_count_is_refused(spoil, says):
    columns = dict(stacked([pad_condition_rows("s", fields(2), LIMIT)] * 2).batch.items())
    columns["condition_video_rows_mask"] = columns["condition_video_rows_mask"].clone()
    spoil(columns)
    with pytest.raises(ContractError, match=says):
        embeds_padding_2_no_padding(DataProto.from_dict(columns).batch)


def test_rows_of_different_width_or_dtype_are_not_padded_together():
    for other in (torch.zeros(1, 4), torch.zeros(1, 3).half()):
        with pytest.raises(ContractError, match=r"2 different forms"):
            pad_to_longest([torch.zeros(2, 3), other])


def test_local_padding_rounds_up_to_the_degree_of_sequence_parallelism():
    padded, mask = pad_to_longest([torch.ones(5, 2), torch.ones(3, 2)], multiple_of=4)
    assert padded.shape == (2, 8, 2)
    assert mask.sum(dim=1).tolist() == [5, 3]
    assert padded[1, 3:].abs().sum() == 0
