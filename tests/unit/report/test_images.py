import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from verl_omni_core.errors import ContractError
from verl_omni_core.report.images import PicturePair, before_after, data_uri, image_grid, png, write_picture


def pictures(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 3, 32, 96), dtype=np.uint8)


def opened(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def test_a_picture_keeps_every_pixel() -> None:
    (pixels,) = pictures(1)
    assert np.array_equal(opened(png(pixels)).transpose(2, 0, 1), pixels)


def test_a_grid_shows_each_picture_enlarged_in_its_place() -> None:
    pixels = pictures(5)
    sheet = opened(image_grid(pixels, [f"prompt {i}" for i in range(5)], [0.5, None, 1.0, 0.0, 0.25], columns=2))
    cell_width, cell_height = 192, 64 + 2 * 16 + 4
    for index, picture in enumerate(pixels):
        row, column = divmod(index, 2)
        top, left = 8 + row * (cell_height + 8), 8 + column * (cell_width + 8)
        shown = sheet[top : top + 64 : 2, left : left + 192 : 2]
        assert np.array_equal(shown.transpose(2, 0, 1), picture), index


def test_captions_are_drawn_and_long_prompts_do_not_widen_the_grid() -> None:
    pixels = pictures(1)
    short, long = opened(image_grid(pixels, ["a"])), opened(image_grid(pixels, ["long " * 200]))
    assert short.shape == long.shape
    assert (long[80:, 150:180] < 128).any()
    assert not np.array_equal(short, long)


def test_rewards_change_the_picture() -> None:
    pixels = pictures(1)
    assert image_grid(pixels, ["a"], [0.25]) != image_grid(pixels, ["a"], [0.75]) != image_grid(pixels, ["a"], [None])


def test_pairs_stand_side_by_side() -> None:
    before, after = pictures(2)
    sheet = opened(before_after([PicturePair("a word", 42, before, after, 0.25, 1.0)] * 2))
    assert np.array_equal(sheet[8:72:2, 8:200:2].transpose(2, 0, 1), before)
    assert np.array_equal(sheet[8:72:2, 208:400:2].transpose(2, 0, 1), after)


@pytest.mark.parametrize("count", [0, 2])
def test_other_numbers_of_prompts_are_refused(count: int) -> None:
    with pytest.raises(ContractError, match="one of each"):
        image_grid(pictures(1), ["p"] * count)


def test_no_pictures_are_refused() -> None:
    with pytest.raises(ContractError, match="at least one"):
        image_grid(pictures(0), [])
    with pytest.raises(ContractError, match="at least one"):
        before_after([])


def test_float_pictures_are_refused() -> None:
    with pytest.raises(ContractError, match="uint8"):
        image_grid(pictures(1).astype(np.float32), ["a"])


def test_a_data_uri_holds_the_bytes() -> None:
    assert base64.b64decode(data_uri(b"abc").removeprefix("data:image/png;base64,")) == b"abc"


def test_writing_makes_the_folder(tmp_path: Path) -> None:
    assert write_picture(tmp_path / "images" / "a.png", b"abc").read_bytes() == b"abc"
