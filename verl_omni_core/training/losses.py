"""From an algorithm component to the loss of a forward pass, with exact weights."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from verl_omni_core.algorithms._contract import Algorithm, Current, LossOutput
from verl_omni_core.batches import columns
from verl_omni_core.errors import ContractError
from verl_omni_core.metrics.rl import rollout_correction_rows

LossFunction = Callable[[Current, Mapping[str, Tensor]], LossOutput]
"""Rows' outputs and stored tensors to rows' losses."""


def diffusion_loss(algorithm: Algorithm, options: Any, *, bypass: bool = False) -> LossFunction:
    """Return the loss function of an algorithm, as :meth:`PPODiffusersFSDPEngine.forward_backward_batch` takes it.

    Args:
        bypass: the engine's log-probs are the old ones; adds ``actor/rollout_corr/*``, since without recomputed ones
            nothing else tells how far trainer and engine are apart.
    Raises:
        ContractError: the algorithm is not evaluated by replay of stored steps; or, when called, its loss is not one
            fp32 number a row.
    """
    if algorithm.EVALUATION != "replay":
        raise ContractError(
            f"the algorithm evaluates the policy by {algorithm.EVALUATION!r}; this engine replays stored steps"
        )

    def loss(current: Current, batch: Mapping[str, Tensor]) -> LossOutput:
        output = algorithm.loss(current, batch, options)
        if output.loss.shape != current.log_probs.shape:
            raise ContractError(
                f"the loss has shape {tuple(output.loss.shape)} for {tuple(current.log_probs.shape)} rows; return one "
                "number a row and leave the mean to the trainer"
            )
        drawn = batch.get(columns.ROLLOUT_LOG_PROBS) if bypass else None
        if drawn is None:
            return output
        return LossOutput(output.loss, {**output.metrics, **rollout_correction_rows(current.log_probs, drawn)})

    return loss


def weighted(loss: Tensor, weight: Tensor, total_weight: float, ranks: int) -> Tensor:
    """Return the scalar whose gradients, summed over passes and averaged over ranks, are those of the weighted mean.

    Args:
        loss: [B] fp32. weight: [B] fp32, 0 for padding. total_weight: of all rows of the mini-batch on all ranks.
        ranks: FSDP divides gradients by it.
    """
    return (loss * weight).sum() * (ranks / total_weight)
