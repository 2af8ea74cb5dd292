"""An object store for the tests of these folders."""

import uuid
from collections.abc import Iterator

import pytest

from tests import object_store


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """``host:port`` of an S3 server."""
    with object_store.server() as running:
        yield running


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials as an environment has them, and nobody's own configuration."""
    for name, value in object_store.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)


@pytest.fixture
def uri(endpoint: str, aws: None) -> str:
    """Address of an empty store."""
    return object_store.address(endpoint, uuid.uuid4().hex)
