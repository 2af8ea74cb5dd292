"""Bring up what a run needs around it: a Ray cluster and, for flows, a Prefect server. Given ones are used."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from verl_omni_core.cluster import prefect_server, ray_head
from verl_omni_core.settings.run import ClusterSettings


@dataclass(frozen=True)
class Surroundings:
    """Where a run's actors and its records live."""

    ray_address: str
    prefect_url: str | None
    started: tuple[str, ...]
    """Names of the services that this call found or started itself; ``verl-omni down`` stops them."""


def start(settings: ClusterSettings, *, with_prefect: bool, say: Callable[[str], None]) -> Surroundings:
    """Start what is not given, side by side, and wait for it. Sets ``RAY_ADDRESS`` and ``PREFECT_API_URL`` here.

    Args:
        settings: the cluster group of the run's settings.
        with_prefect: whether the run is a flow.
        say: takes one line for the user.
    """
    own = []
    address, url = ray_head.given(settings), prefect_server.given()
    head = ray_head.launch(settings) if address is None else None
    server = prefect_server.launch() if with_prefect and url is None else None
    if head is not None:
        say(f"Ray head: starting or found, log {head.log}")
        address = ray_head.wait(head)
        own.append(head.name)
    if server is not None:
        say(f"Prefect server: starting or found, log {server.log}")
        os.environ.update(prefect_server.environment())
        url = prefect_server.wait(server)
        own.append(server.name)
    assert address is not None
    os.environ["RAY_ADDRESS"] = address
    if with_prefect and url is not None:
        os.environ["PREFECT_API_URL"] = url
    return Surroundings(address, url if with_prefect else None, tuple(own))
