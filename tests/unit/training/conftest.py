import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.training import tiny


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-sd3")
    tiny.ADAPTER.build_tiny(str(folder), seed=0)
    return folder


@pytest.fixture(scope="session")
def batch(pipeline: Path) -> object:
    return tiny.batch(pipeline)


@pytest.fixture(autouse=True)
def _threads_and_seeds() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    state = random.getstate()
    yield
    random.setstate(state)
    torch.set_num_threads(before)
