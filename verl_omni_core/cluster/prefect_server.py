"""A standing Prefect server on SQLite, for machines that have none. Talks to it over HTTP; imports no prefect."""

import os
import sys
import urllib.error
import urllib.request

from verl_omni_core.cluster import services

NAME = "prefect-server"
START_TIMEOUT_S = 180.0


def environment() -> dict[str, str]:
    """Return the environment of the server and of flows that use it, without its address."""
    return {
        "PREFECT_HOME": str(services.home() / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "PREFECT_EVENTS_WORKER_MAX_QUEUE_SIZE": "10000",
        # waits double from 2 s: a flow outlives a server that is gone for minutes, where 5 would be one minute
        "PREFECT_CLIENT_MAX_RETRIES": "8",
    }


def given() -> str | None:
    """Return the address of a server that the user gave, if any."""
    return os.environ.get("PREFECT_API_URL")


def launch() -> services.Service:
    """Start the server unless it runs; return at once."""
    with services.locked(NAME):
        return services.find(NAME) or _launch()


def _launch() -> services.Service:
    port = services.free_port()
    address = f"http://127.0.0.1:{port}/api"
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    return services.launch(NAME, command, address, {**environment(), "PREFECT_UI_API_URL": address})


def wait(service: services.Service) -> str:
    """Wait until the server answers and return its address."""
    services.wait_until(service, lambda: answers(service.address), START_TIMEOUT_S)
    return service.address


def answers(address: str) -> bool:
    """Say whether a server is there and healthy."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False  # not listening yet, or not any more: the caller decides
