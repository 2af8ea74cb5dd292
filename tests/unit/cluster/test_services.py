"""Local services: one of each kind, whoever starts it."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl_omni_core.cluster import prefect_server, ray_head, services
from verl_omni_core.errors import DeadlineError
from verl_omni_core.settings.run import ClusterSettings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_OMNI_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


@pytest.mark.parametrize("kind", [ray_head, prefect_server])
def test_commands_that_start_a_service_at_once_share_one(
    home: Path, monkeypatch: pytest.MonkeyPatch, kind: object
) -> None:
    start = services.launch

    def slow(name: str, command: list[str], address: str, environment: dict[str, str]) -> services.Service:
        time.sleep(0.3)
        return start(name, ["sleep", "60"], address, environment)

    monkeypatch.setattr(services, "launch", slow)
    settings = ClusterSettings(object_store_mb=80)
    launch = (lambda _: ray_head.launch(settings)) if kind is ray_head else lambda _: prefect_server.launch()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(launch, range(4)))
    try:
        assert len({service.pid for service in found}) == 1
    finally:
        assert services.stop(found[0].name)
    assert not found[0].is_alive()


def test_who_waits_for_another_start_too_long_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "LOCK_S", 0.3)
    with services.locked("ray-head"), pytest.raises(DeadlineError, match="starting or stopping ray-head"):
        ray_head.launch(ClusterSettings())


def test_looking_for_a_cluster_starts_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_head.existing(ClusterSettings()) is None
    assert ray_head.existing(ClusterSettings(ray_address="10.0.0.1:6379")) == "10.0.0.1:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    assert ray_head.existing(ClusterSettings()) == "10.0.0.2:6379"
    assert list(home.iterdir()) == []
