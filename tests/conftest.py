"""What every test may rely on: no settings from outside, no hub, local services in a folder of their own."""

import os

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
