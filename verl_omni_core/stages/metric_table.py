"""Metrics as a table and back."""

from collections.abc import Mapping
from datetime import UTC, datetime

import pyarrow as pa

from verl_omni_core.batches.tables import build_table


def metric_table(step: int, metrics: Mapping[str, float]) -> pa.Table:
    """Return the ``metrics`` table of a step, sorted by name."""
    names = sorted(metrics)
    now = datetime.now(UTC)
    return build_table(
        "metrics",
        {
            "step": [step] * len(names),
            "name": names,
            "value": [float(metrics[name]) for name in names],
            "wall_time": [now] * len(names),
        },
    )


def metrics_of(table: pa.Table) -> dict[str, float]:
    """Return the metrics of a table, by name."""
    return dict(zip(table.column("name").to_pylist(), table.column("value").to_pylist(), strict=True))
