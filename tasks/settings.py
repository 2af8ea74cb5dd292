"""What every task has in common: the store decides what is done, so Prefect neither caches nor keeps results."""

from typing import Any

from prefect.cache_policies import NO_CACHE

from verl_omni_core.errors import VerlOmniError

STAGE: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "cache_result_in_memory": False,
}
"""Options of a stage task. A stage that is committed returns at once, in this run or in any later one."""


def may_succeed_again(task: Any, run: Any, state: Any) -> bool:
    """Say whether a failed stage is worth a retry: only where the error's class says so."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, VerlOmniError) and error.retryable


RETRIED: dict[str, Any] = {**STAGE, "retries": 2, "retry_delay_seconds": 2, "retry_condition_fn": may_succeed_again}
"""Options of a stage whose transient faults pass: generation, scoring, weight sync."""
