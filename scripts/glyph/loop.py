"""A training loop for steps that take no input: on a GPU the whole step becomes one CUDA graph."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

WARMUP_SHARE = 0.05


@dataclass(frozen=True)
class Budget:
    """How long and how fast to train."""

    steps: int
    peak_learning_rate: float

    def learning_rate(self, progress: float) -> float:
        """Linear warm-up, then linear decay to zero over the progress 0 to 1."""
        return self.peak_learning_rate * min(progress / WARMUP_SHARE, (1 - progress) / (1 - WARMUP_SHARE))


def train(
    name: str,
    loss_of_batch: Callable[[], torch.Tensor],
    parameters: list[nn.Parameter],
    budget: Budget,
    report_every: int = 500,
    weight_decay: float = 0.01,
) -> None:
    """Minimise ``loss_of_batch``, which draws its own batch."""
    device = parameters[0].device
    on_gpu = device.type == "cuda"
    learning_rate = torch.tensor(0.0, device=device)
    optimizer = torch.optim.AdamW(
        parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay, fused=on_gpu, capturable=on_gpu
    )
    latest_loss = torch.zeros((), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of_batch()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        latest_loss.copy_(loss.detach())

    run_step = _captured(step, optimizer) if on_gpu else step
    started = time.monotonic()
    for done in range(budget.steps):
        learning_rate.fill_(budget.learning_rate(done / budget.steps))
        run_step()
        if done % report_every == 0:
            loss = latest_loss.item()
            print(f"{name} step {done} loss {loss:.4f} {time.monotonic() - started:.0f} s", flush=True)


def _captured(step: Callable[[], None], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """``step`` as a CUDA graph, warmed up at learning rate zero."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
