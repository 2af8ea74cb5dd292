"""The processes that train together, and the few small things they agree on.

Rank 0 opens the rendezvous on a port that the system gives it, so no port is ever chosen and then lost.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_omni_core.errors import ConfigError, ContractError


@dataclass(frozen=True)
class Ranks:
    """One rank's view of the group. Without a process group it is a group of one, and nothing is sent."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"rank {self.rank} does not exist in a group of {self.size}")
        if self.size > 1 and self.group is None:
            raise ConfigError(f"{self.size} ranks need a process group; call ranks.join first")

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum over all ranks of a CPU tensor."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over all ranks of a CPU tensor."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Return every rank's CPU tensor, of one shape, in the order of the ranks."""
        if self.group is None:
            return [values]
        found = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(found, values, group=self.group)
        return found

    def agree(self, yes: bool) -> bool:
        """Return whether all ranks say yes."""
        return self._reduced(torch.tensor([int(yes)]), dist.ReduceOp.MIN).item() == 1

    def barrier(self) -> None:
        """Wait for all ranks, at most the group's timeout."""
        self.agree(True)

    def _reduced(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        result = values.clone()
        if self.group is not None:
            dist.all_reduce(result, op, group=self.group)
        return result

    def beside(self, timeout_s: float) -> "Ranks":
        """Return the same ranks with a group of their own, for CPU tensors: what a thread uses beside training.

        All ranks call it together.

        Args:
            timeout_s: deadline of every collective.
        """
        if self.size == 1:
            return Ranks()
        return Ranks(self.rank, self.size, dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))


def vote(ranks: Ranks, action: Callable[[], Any] | None) -> Any:
    """Run ``action`` on every rank and go on only if it went well on all of them.

    Raises:
        Whatever it raised here; ContractError if it failed on another rank.
    """
    outcome, refusal = None, None
    try:
        outcome = action() if action is not None else None
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this vote; it is raised after it
        refusal = error
    agreed = ranks.agree(refusal is None)
    if refusal is not None:
        raise refusal
    if not agreed:
        raise ContractError("another rank refused; nothing was changed on any of them, the command can be repeated")
    return outcome


def open_rendezvous(host: str, timeout_s: float, port: int = 0) -> tuple[dist.TCPStore, int]:
    """Open the store through which ranks meet; rank 0 calls this and keeps the store.

    Args:
        host: address that it listens on, alone.
        timeout_s: deadline of meeting.
        port: 0 for a free one.
    Returns: the store and its port.
    """
    # the store asks for no password, and left to itself it listens on every address of the machine
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address[0], port, *address[2:]))
        listening.listen()
        port = int(listening.getsockname()[1])
        store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listening.detach(),  # the store closes it
        )
    return store, port


def join(
    rank: int,
    size: int,
    *,
    host: str,
    port: int,
    device: str,
    timeout_s: float,
    store: dist.TCPStore | None = None,
) -> Ranks:
    """Join the group: gloo for CPU tensors, and NCCL for CUDA ones where ``device`` is one.

    Args:
        rank, size: this process's place and how many there are.
        host, port: where rank 0 opened the rendezvous.
        device: ``cpu`` or ``cuda:<n>``; set as current by the caller.
        timeout_s: deadline of every collective.
        store: rank 0's own store.
    """
    if dist.is_initialized():
        raise ContractError("this process already belongs to a group of ranks; leave it first")
    _prefer_loopback(host)
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return Ranks(rank, size, dist.group.WORLD)


def alone(device: str) -> Ranks:
    """Return a group of one that has a process group: what sharding with a lower compute dtype needs on one rank."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return Ranks(0, 1, dist.group.WORLD)


def leave() -> None:
    """Leave the group; does nothing outside one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from a seed of its own inside, leave the generators as they were outside."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _prefer_loopback(host: str) -> None:
    # gloo otherwise asks the resolver for this machine's name, which on an offline laptop fails or waits
    if host.startswith("127.") or host == "localhost":
        names = [name for _, name in socket.if_nameindex()]
        for name in ("lo", "lo0"):
            if name in names:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
