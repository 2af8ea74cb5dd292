"""What every test may rely on: no settings from outside, no hub, local services in a folder of their own."""

import os
import sys

import hypothesis
import pytest

# the same examples in every run: a property that fails must not depend on the day
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory):
    """Keep the user's environment and home out of the tests, also out of the processes that they start."""
    patch = pytest.MonkeyPatch()
    for name in [name for name in os.environ if name.startswith("VERL_OMNI_")]:
        patch.delenv(name)
    for name in ("PREFECT_API_URL", "RAY_ADDRESS"):
        patch.delenv(name, raising=False)
    patch.setenv("VERL_OMNI_HOME", str(tmp_path_factory.mktemp("home")))
    patch.setenv("HF_HUB_OFFLINE", "1")
    yield
    patch.undo()


_status: list[int] = []


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    _status.append(int(exitstatus))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave without taking the interpreter apart: native threads that engines and process groups left may still run
    then, and a crash would hide what the tests said."""
    if _status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status[-1])
