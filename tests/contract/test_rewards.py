"""Every scorer in the tree keeps the promises of its kind; a new file is found by itself."""

import dataclasses
import inspect
import subprocess
import sys

import numpy as np
import pytest

from verl_omni_core import registry
from verl_omni_core.rewards._contract import Score, ScoringItem

NAMES = registry.names("reward")


def items(count: int) -> list[ScoringItem]:
    rng = np.random.default_rng(7)
    return [
        ScoringItem(f"s{i}", rng.integers(0, 256, (3, 32, 96), dtype=np.uint8), f'the word "W{i}"', f"W{i}")
        for i in range(count)
    ]


def built(name: str):
    return registry.component("reward", name).build(registry.options("reward", name, {}))


@pytest.mark.parametrize("name", NAMES)
def test_options_are_a_frozen_dataclass_with_a_default_and_help_for_each_field(name: str) -> None:
    options = registry.component("reward", name).Options
    assert dataclasses.is_dataclass(options)
    assert options.__dataclass_params__.frozen
    for field in dataclasses.fields(options):
        assert field.default is not dataclasses.MISSING
        assert any(getattr(note, "description", None) for note in field.type.__metadata__), field.name


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_scores_like_its_items_and_in_range(name: str) -> None:
    scorer = built(name)
    batch = items(3)
    scores = scorer.score(batch)
    assert scores == [scorer.score([one])[0] for one in batch] == built(name).score(batch)
    low, high = scorer.RANGE
    for score in scores:
        assert isinstance(score, Score)
        assert (score.value is None) == (score.error is not None)
        assert score.value is None or low <= score.value <= high
        assert all(isinstance(value, float | str) for value in score.extra.values())


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_has_no_scores_and_the_version_is_text(name: str) -> None:
    scorer = built(name)
    assert scorer.score([]) == []
    assert isinstance(scorer.VERSION, str)
    assert scorer.VERSION


@pytest.mark.parametrize("name", NAMES)
def test_importing_a_scorer_loads_no_heavy_package(name: str) -> None:
    module = inspect.getmodule(registry.component("reward", name).build).__name__
    heavy = ("torch", "rapidocr", "onnxruntime", "cv2", "ray")
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
