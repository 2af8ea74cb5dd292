"""Average of the policy over optimizer steps: what validation draws with and what is exported.

``e <- e + (1 - d_n) (theta - e)`` with ``d_n = min((1 + n) / (10 + n), decay)`` after the n-th optimizer step, n from 0
(Flow-GRPO's form with interval 1: the young average follows the policy closely and forgets its start). A skipped step
does not tick. Each rank averages its own shard.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from verl_omni_core.training.sharding import local


class PolicyAverage:
    """The average of named parameters. ``tensors`` are sharded like the parameters."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._parameters = dict(parameters)
        self.decay = decay
        self.updates = 0
        """Optimizer steps averaged so far."""
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> float:
        """Take in the parameters after an optimizer step; return the decay that was used."""
        decay = decay_after(self.updates, self.decay)
        averages = [local(tensor) for tensor in self.tensors.values()]
        policies = [local(parameter) for parameter in self._parameters.values()]
        torch._foreach_lerp_(averages, policies, 1.0 - decay)
        self.updates += 1
        return decay

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the average stand in for the policy inside; the policy is back afterwards, also on errors."""
        policy = {name: local(parameter).clone() for name, parameter in self._parameters.items()}
        self._write({name: local(tensor) for name, tensor in self.tensors.items()})
        try:
            yield
        finally:
            self._write(policy)

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local(parameter).copy_(values[name])


def decay_after(updates: int, decay: float) -> float:
    """Return the decay of the update number ``updates``, counted from 0."""
    return min((1 + updates) / (10 + updates), decay)
