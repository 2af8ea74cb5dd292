"""Which rows are computed together, and in what shape."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from verl_omni_core.rollout._contract import PackPosition, SampleRequest, SamplingParams
from verl_omni_core.rollout._drawing import plan_batches

SAMPLING = SamplingParams(32, 32, 4, "flow_sde", {}, "uniform", 0.7, (0, 2), 1.0, 16)


def _request(index: int, size: int | None = None, sampling: SamplingParams = SAMPLING) -> SampleRequest:
    pack = None if size is None else PackPosition(index, size)
    return SampleRequest(f"r{index}", "a cat", None, 100 + index, sampling, pack)


def test_rows_of_different_sampling_never_share_a_pass() -> None:
    other = replace(SAMPLING, noise_level=0.3)
    window = replace(SAMPLING, window=(1, 3))
    requests = [_request(i, sampling=s) for i, s in enumerate([SAMPLING, other, SAMPLING, window, other])]
    assert [batch.owners for batch in plan_batches(requests, 8)] == [(0, 2), (1, 4), (3,)]


def test_passes_are_at_most_the_limit() -> None:
    batches = plan_batches([_request(i) for i in range(5)], 2)
    assert [batch.owners for batch in batches] == [(0, 1), (2, 3), (4,)]


def test_a_row_of_a_pack_stands_at_its_place_and_copies_fill_the_rest() -> None:
    requests = [_request(5, 8), _request(2, 8)]
    (batch,) = plan_batches(requests, 32)
    assert batch.owners == (None, None, 1, None, None, 0, None, None)
    assert [row.seed for row in batch.rows] == [102, 102, 102, 102, 102, 105, 102, 102]


def test_a_pack_larger_than_the_limit_is_computed_in_parts_of_the_limit() -> None:
    batches = plan_batches([_request(index, 6) for index in range(6)], 4)
    assert [batch.owners for batch in batches] == [(0, 1, 2, 3), (4, 5, None, None)]


@given(st.permutations(range(6)), st.integers(1, 6), st.integers(1, 8))
def test_place_and_shape_of_a_row_depend_on_the_row_alone(order: list[int], cut: int, limit: int) -> None:
    requests = [_request(index, 6) for index in order]
    for part in (requests[:cut], requests[cut:]):
        for batch in plan_batches(part, limit):
            assert len(batch.rows) == min(6, limit)
            for place, owner in enumerate(batch.owners):
                if owner is not None:
                    assert place == part[owner].pack.index % min(6, limit)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, 4, 6]), st.sampled_from([0.3, 0.7])), max_size=20))
def test_every_request_is_drawn_exactly_once(rows: list[tuple[int, int | None, float]]) -> None:
    requests = [_request(index, size, replace(SAMPLING, noise_level=noise)) for index, size, noise in rows]
    owners = [owner for batch in plan_batches(requests, 3) for owner in batch.owners if owner is not None]
    assert sorted(owners) == list(range(len(requests)))
