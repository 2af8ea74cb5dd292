import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from verl_omni_core import registry
from verl_omni_core.errors import ConfigError
from verl_omni_core.rewards import jpeg_size
from verl_omni_core.rewards._contract import ScoringItem

GOLDEN = Path(__file__).parents[2] / "parity" / "rewards"
PICTURES = [case for case in json.loads((GOLDEN / "jpeg.json").read_text())["cases"] if "image" in case]


def item(name: str) -> ScoringItem:
    pixels = np.asarray(Image.open(GOLDEN / "images" / name).convert("RGB")).transpose(2, 0, 1)
    return ScoringItem(sample_id=name, image=pixels, prompt="")


@pytest.mark.parametrize("case", PICTURES)
@pytest.mark.parametrize("direction", ["compressibility", "incompressibility"])
def test_sizes_equal_the_peers_within_encoder_builds(case: dict, direction: str) -> None:
    scorer = jpeg_size.build(registry.options("reward", "jpeg_size", {"reward": direction}))
    (score,) = scorer.score([item(case["image"])])
    assert score.value == pytest.approx(case[direction], rel=0.02)
    assert score.extra["bytes"] == pytest.approx(case["jpeg_bytes_q95"], rel=0.02)


def test_scores_lie_in_the_declared_range_and_a_flat_picture_compresses_best() -> None:
    names = [case["image"] for case in PICTURES]
    scorer = jpeg_size.build(jpeg_size.Options())
    values = [score.value for score in scorer.score([item(name) for name in names])]
    assert all(value is not None and scorer.RANGE[0] < value < scorer.RANGE[1] for value in values)
    assert names[int(np.argmax(values))] == "solid_32x32_0.png"


def test_an_unknown_direction_is_refused() -> None:
    with pytest.raises(ConfigError, match="reward"):
        registry.options("reward", "jpeg_size", {"reward": "both"})
