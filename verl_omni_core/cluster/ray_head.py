"""The Ray cluster that holds a run's actors: a given one, or a standing local head.

The local head binds to loopback: it asks for no password, and who reaches its ports can run code. Ray itself replaces a
loopback address by the host's own, in the head and in every driver, unless a switch forbids clusters of many machines.

The cluster outlives the flow. A driver connects, never shuts it down, and finds actors by name in the run's namespace.
"""

import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

from verl_omni_core.cluster import services
from verl_omni_core.errors import ConfigError
from verl_omni_core.settings.run import ClusterSettings

NAME = "ray-head"
START_TIMEOUT_S = 120.0
SHM = Path("/dev/shm")

# Ray's own defaults ask for a token file in the user's home, report usage and print a note for every actor.
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Named for the systems on which it is off by default. Ray reads it when it is first imported."""


def given(settings: ClusterSettings) -> str | None:
    """Return the address of a cluster that the settings or the environment name, if any."""
    return settings.ray_address or os.environ.get("RAY_ADDRESS")


def launch(settings: ClusterSettings) -> services.Service:
    """Start a local head unless it runs; return at once.

    Raises:
        ConfigError: shared memory is too small for the object store.
    """
    with services.locked(NAME):
        return services.find(NAME) or _launch(settings)


def existing(settings: ClusterSettings) -> str | None:
    """Return the address of a given cluster, or of the local head if it runs; starts nothing."""
    head = services.find(NAME)
    return given(settings) or (head.address if head is not None else None)


def _launch(settings: ClusterSettings) -> services.Service:
    size = settings.object_store_mb * 2**20
    if SHM.exists() and shutil.disk_usage(SHM).free < size:
        free_mb = shutil.disk_usage(SHM).free // 2**20
        raise ConfigError(
            f"cluster.object_store_mb is {settings.object_store_mb}, but {SHM} has {free_mb} MB free; lower the "
            "setting or give the container more shared memory"
        )
    port = services.free_port()
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--node-ip-address", "127.0.0.1", "--port", str(port)),
        *("--include-dashboard", "false", "--disable-usage-stats"),
        *("--object-store-memory", str(size)),
    ]
    return services.launch(NAME, command, f"127.0.0.1:{port}", ENVIRONMENT | LOOPBACK_ONLY)


def wait(service: services.Service) -> str:
    """Wait until the head accepts drivers and return its address."""
    services.wait_until(service, lambda: _accepts(service.address), START_TIMEOUT_S)
    return service.address


def connect(address: str, namespace: str) -> None:
    """Connect this process to the cluster as a driver in ``namespace``; does nothing if it is connected."""
    import ray

    if ray.is_initialized():
        return
    os.environ.update(ENVIRONMENT)
    if _is_own(address):
        _stay_on_loopback()
    options: dict[str, Any] = dict(log_to_driver=False, logging_level="ERROR", configure_logging=False)
    ray.init(address=address, namespace=namespace, **options)


def _is_own(address: str) -> bool:
    head = services.find(NAME)
    return head is not None and head.address == address


def _stay_on_loopback() -> None:
    """Make this driver address our own head as the head addresses itself."""
    from ray._private import ray_constants

    os.environ.update(LOOPBACK_ONLY)  # for processes that this one starts
    ray_constants.ENABLE_RAY_CLUSTER = False  # here: whoever imported ray before has fixed the switch's value


def _accepts(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except OSError:
        return False  # not listening yet: the caller's deadline decides
    return True
