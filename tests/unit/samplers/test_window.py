"""Windows are pure functions of settings and step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_omni_core.errors import ConfigError, UnknownNameError
from verl_omni_core.samplers._window import window_envelope, window_of_step


@st.composite
def envelopes(draw: st.DrawFn) -> tuple[int, tuple[int, int] | None, int | None]:
    steps = draw(st.integers(2, 60))
    low = draw(st.integers(0, steps - 2))
    high = draw(st.integers(low + 1, steps - 1))
    chosen = draw(st.sampled_from([None, (low, high)]))
    room = steps - 1 if chosen is None else high - low
    return steps, chosen, draw(st.none() | st.integers(1, room))


@given(envelopes(), st.integers(0, 2**31), st.integers(1, 10_000))
def test_a_window_is_never_empty_inside_its_range_and_without_the_last_step(
    envelope: tuple[int, tuple[int, int] | None, int | None], seed: int, step: int
) -> None:
    steps, chosen, size = envelope
    start, end = window_of_step(seed, step, num_inference_steps=steps, size=size, range=chosen)
    low, high = chosen or (0, steps - 1)
    assert low <= start < end <= high <= steps - 1
    assert end - start == (size or high - low)
    assert (start, end) == window_of_step(seed, step, num_inference_steps=steps, size=size, range=chosen)


def test_without_size_and_range_all_steps_but_the_last_are_stochastic() -> None:
    assert window_of_step(0, 1, num_inference_steps=10, size=None, range=None) == (0, 9)


def test_a_range_of_none_is_the_whole_run_also_with_a_size() -> None:
    starts = {window_of_step(3, step, num_inference_steps=8, size=2, range=None)[0] for step in range(1, 200)}
    assert starts == set(range(6))


def test_starts_are_spread_evenly_over_steps() -> None:
    starts = [window_of_step(11, step, num_inference_steps=10, size=2, range=(0, 5))[0] for step in range(1, 4001)]
    for start in range(4):
        assert starts.count(start) == pytest.approx(1000, abs=150)


@pytest.mark.parametrize(
    ("size", "chosen", "key"),
    [
        (1, (0, 10), "sde_window_range"),  # holds the last step
        (1, (3, 3), "sde_window_range"),
        (1, (-1, 4), "sde_window_range"),
        (6, (0, 5), "sde_window_size"),
        (0, (0, 5), "sde_window_size"),
    ],
)
def test_settings_that_hold_no_window_are_refused_by_name(size: int, chosen: tuple[int, int], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        window_envelope(num_inference_steps=10, size=size, range=chosen)


def test_one_step_leaves_no_room_for_a_window() -> None:
    with pytest.raises(ConfigError, match="at least 2 steps"):
        window_of_step(0, 1, num_inference_steps=1, size=None, range=None)


def test_an_unknown_strategy_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="random"):
        window_of_step(0, 1, num_inference_steps=10, size=2, range=None, strategy="rnadom")
