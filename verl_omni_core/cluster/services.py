"""Standing local services: a Ray head and a Prefect server in sessions of their own, which outlive the command.

Each service is one process group with its output in a log file. A small JSON file remembers them, so that the next
command finds them and ``verl-omni down`` stops exactly these. All of them bind to loopback.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import psutil

from verl_omni_core.errors import DeadlineError, EngineError
from verl_omni_core.home import home

STOP_GRACE_S = 5.0  # a Ray head would drain for half a minute
POLL_S = 0.2
LOCK_S = 30.0


@dataclass(frozen=True)
class Service:
    """A running service."""

    name: str
    pid: int
    created: float
    """Start time of the process: tells it from a later process with the same id."""
    address: str
    log: str

    def is_alive(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.created) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def free_port() -> int:
    """Return a TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def find(name: str) -> Service | None:
    """Return the remembered service if it still runs."""
    path = home() / f"{name}.json"
    if not path.exists():
        return None
    service = Service(**json.loads(path.read_text()))
    return service if service.is_alive() else None


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Keep other processes out while this one looks for a service and starts it, so that no second one is started.

    Raises:
        DeadlineError: another process holds the lock; a start takes a moment, the waiting until it is ready needs none.
    """
    deadline = time.monotonic() + LOCK_S
    with (home() / f"{name}.lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"another process has been starting or stopping {name} for {LOCK_S:.0f} s; see {file.name}"
                    ) from None
                time.sleep(POLL_S)
        yield


def launch(name: str, command: list[str], address: str, environment: dict[str, str]) -> Service:
    """Start ``command`` in its own session with its output in a log file, and remember it."""
    log = home() / f"{name}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    service = Service(name, process.pid, psutil.Process(process.pid).create_time(), address, str(log))
    path = home() / f"{name}.json"
    path.with_suffix(".tmp").write_text(json.dumps(asdict(service)))
    path.with_suffix(".tmp").replace(path)
    return service


def wait_until(service: Service, is_ready: Callable[[], bool], timeout_s: float) -> None:
    """Wait until ``is_ready``.

    Raises:
        EngineError: the service ended. DeadlineError: it is not ready after ``timeout_s`` seconds.
    """
    deadline = time.monotonic() + timeout_s
    while not is_ready():
        if not service.is_alive():
            raise EngineError(f"{service.name} ended while starting; see {service.log}")
        if time.monotonic() > deadline:
            raise DeadlineError(f"{service.name} was not ready after {timeout_s:.0f} s; see {service.log}")
        time.sleep(POLL_S)


def stop(name: str) -> bool:
    """Stop a remembered service and everything it started; return whether one ran."""
    with locked(name):
        return _stop(name)


def _stop(name: str) -> bool:
    service = find(name)
    (home() / f"{name}.json").unlink(missing_ok=True)
    if service is None:
        return False
    members = _tree(service.pid)
    os.killpg(service.pid, signal.SIGTERM)
    _, alive = psutil.wait_procs(members, timeout=STOP_GRACE_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=STOP_GRACE_S)
    return True


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return []
