"""What is kept of an update's optimizer steps: a ledger record of each, and the answer for all of them."""

import json
from typing import Any

from verl_omni_core.errors import ContractError
from verl_omni_core.metrics.reduce import Accumulator
from verl_omni_core.workers.commands import UpdateCommand, UpdateResult
from verl_omni_core.workers.training_worker import MiniBatchResult


def refuse_other_rows(before: list[str], now: list[str], step: int) -> None:
    """Raise ContractError unless the digests of a step's mini-batches begin with those of its applied ones."""
    if before != now[: len(before)]:
        raise ContractError(
            f"the update of step {step} was begun with other rows than those sent now; send the first command again"
        )


def record(command: UpdateCommand, number: int, batch_digest: str, result: MiniBatchResult) -> dict[str, Any]:
    """Return the ledger record of optimizer step ``number``."""
    last = number + 1 == len(command.mini_batches)
    return {
        "update_id": command.update_id(number),
        "step": command.step,
        "minibatch": number,
        "kind": "opt",
        "version_before": command.expected_version,
        "version_after": command.step if last else command.expected_version,
        "batch_digest": batch_digest,
        "skipped": result.skipped,
        "metrics_json": json.dumps(result.metrics.result(), sort_keys=True),
    }


def answer(
    command: UpdateCommand, applied: list[dict[str, Any]], learning_rate: float, *, seconds: float
) -> UpdateResult:
    """Return the answer to a command.

    Args:
        applied: of each optimizer step its ``record``, its metrics' ``state`` and its rows' ``ratio_deviation``.
        learning_rate: of the next training step.
    """
    metrics = Accumulator()
    for done in applied:
        metrics.merge(done["state"])
    deviation = next((done["ratio_deviation"] for done in applied if done["ratio_deviation"] is not None), None)
    metrics.add({"actor/lr": learning_rate})
    if deviation is not None:
        metrics.add({"actor/first_ratio_deviation": deviation})
    records = [done["record"] for done in applied]
    skipped = sum(record["skipped"] for record in records)
    return UpdateResult(command.step, command.step, metrics.result(), records, skipped, deviation, seconds)
