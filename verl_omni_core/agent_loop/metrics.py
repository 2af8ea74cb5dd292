"""Where the time of a step's samples went."""

from collections.abc import Mapping, Sequence

TIMINGS = ("generate_sequences", "tool_calls", "compute_score")


def agent_loop_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Reduce the timings of samples to the step's metrics.

    Args:
        metrics: ``meta_info["metrics"]`` of a batch.
    Returns: ``agent_loop/<timing>/min``, ``/max``, ``/mean``; the same of ``num_preempted`` over samples whose engine
        counts; ``agent_loop/slowest/<timing>`` of the sample that took longest. Seconds.
    """
    if not metrics:
        return {}
    found: dict[str, float] = {}
    for name in (*TIMINGS, "num_preempted"):
        values = [float(row[name]) for row in metrics if name in TIMINGS or row[name] >= 0]
        if values:
            found[f"agent_loop/{name}/min"] = min(values)
            found[f"agent_loop/{name}/max"] = max(values)
            found[f"agent_loop/{name}/mean"] = sum(values) / len(values)
    slowest = max(metrics, key=lambda row: sum(row[name] for name in TIMINGS))
    return found | {f"agent_loop/slowest/{name}": float(slowest[name]) for name in TIMINGS}
