"""One tiny pipeline for all engine tests."""

import pytest

from verl_omni_core.models import sd3


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tiny_sd3"))
    sd3.build(None).build_tiny(folder, seed=0)
    return folder
