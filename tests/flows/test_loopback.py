"""What a run's services listen on: none of them asks for a password."""

import ipaddress

import psutil
import pytest

from tests.flows.conftest import Ran
from verl_omni_core.cluster import prefect_server, ray_head, services

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("name", "least"), [(ray_head.NAME, 3), (prefect_server.NAME, 1)])
def test_every_socket_of_services_and_actors_listens_on_loopback(flow: Ran, name: str, least: int) -> None:
    service = services.find(name)
    assert service is not None and len(flow.requests()) == 1  # the engine lives
    found = _listening(service.pid)
    assert len(found) >= least
    assert not [line for line, ip in found if not _is_loopback(ip)]


def _is_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _listening(pid: int) -> list[tuple[str, str]]:
    """Return each listening socket of a process and all below it, described, and its address."""
    found = []
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        try:
            connections, command = process.net_connections("inet"), " ".join(process.cmdline())[:120]
        except psutil.NoSuchProcess:
            continue  # a worker of Ray's that ended a moment ago
        sockets = [connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN]
        found += [(f"{socket.ip}:{socket.port} of {command}", socket.ip) for socket in sockets]
    return found
