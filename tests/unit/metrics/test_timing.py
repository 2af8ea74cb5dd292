"""Stage times and throughput."""

import pytest

from verl_omni_core.metrics.timing import throughput_metrics, timing_metrics


def test_only_stages_that_grow_with_samples_have_a_time_a_sample() -> None:
    found = timing_metrics({"gen": 4.0, "reward": 1.0}, 8)
    assert found == {"timing_s/gen": 4.0, "timing_s/reward": 1.0, "timing_per_image_ms/gen": 500.0}


def test_a_step_without_samples_has_no_time_a_sample() -> None:
    assert timing_metrics({"gen": 4.0}, 0) == {"timing_s/gen": 4.0}


def test_throughput_is_by_second_and_device() -> None:
    assert throughput_metrics(96, 8.0, 4)["perf/throughput"] == 3.0


@pytest.mark.parametrize(("seconds", "devices"), [(0.0, 1), (1.0, 0)])
def test_no_time_or_no_device_is_an_error(seconds: float, devices: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        throughput_metrics(1, seconds, devices)
