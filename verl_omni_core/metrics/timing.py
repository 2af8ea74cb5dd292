"""Metrics of wall time and throughput."""

from collections.abc import Mapping

PER_SAMPLE_STAGES = ("gen", "ref", "old_log_prob", "adv", "update_actor")
"""Stages whose time grows with the number of samples, by the names of the metrics."""


def timing_metrics(seconds: Mapping[str, float], num_samples: int) -> dict[str, float]:
    """Return ``timing_s/{stage}`` of every stage and ``timing_per_image_ms/{stage}`` of those that scale.

    Args:
        seconds: stage to wall time in seconds.
        num_samples: samples of the step; with 0 the second kind is left out.
    """
    metrics = {f"timing_s/{stage}": float(time_s) for stage, time_s in seconds.items()}
    if num_samples > 0:
        for stage in PER_SAMPLE_STAGES:
            if stage in seconds:
                metrics[f"timing_per_image_ms/{stage}"] = 1000 * seconds[stage] / num_samples
    return metrics


def throughput_metrics(num_samples: int, step_time_s: float, num_devices: int) -> dict[str, float]:
    """Return ``perf/total_num_images``, ``perf/time_per_step`` and ``perf/throughput`` (samples/s and device).

    Args:
        step_time_s: wall time of the step.
        num_devices: GPUs that train or generate; 1 where there are none.

    Raises:
        ValueError: a time or device count that is not positive.
    """
    if step_time_s <= 0 or num_devices < 1:
        raise ValueError(f"got a step of {step_time_s} s on {num_devices} devices; both must be positive")
    return {
        "perf/total_num_images": float(num_samples),
        "perf/time_per_step": float(step_time_s),
        "perf/throughput": num_samples / (step_time_s * num_devices),
    }
