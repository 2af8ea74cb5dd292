"""Optimizer and learning-rate schedule."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from verl_omni_core.settings.training import TrainingSettings


def build_optimizer(parameters: Iterable[nn.Parameter], settings: TrainingSettings) -> torch.optim.Optimizer:
    """Return AdamW, or SGD without momentum, for which decoupled decay and an L2 term are the same."""
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def learning_rate_factor(settings: TrainingSettings, step: int, total_steps: int) -> float:
    """Return the factor of the learning rate in training step ``step``, counted from 0.

    Warm-up is the straight line from 0 before the first step to 1 in the step after the last warm-up step, so no step
    is spent at 0 (the peers spend the first). The cosine then falls over half a period to ``min_lr_ratio``, which it
    reaches at ``total_steps`` and keeps.
    """
    warmup = settings.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if settings.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return settings.min_lr_ratio + (1 - settings.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def build_scheduler(optimizer: torch.optim.Optimizer, settings: TrainingSettings, total_steps: int) -> LambdaLR:
    """Return the schedule; the trainer advances it once a training step, after the last mini-batch."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(settings, step, total_steps))
