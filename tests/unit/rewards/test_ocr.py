import json
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from verl_omni_core import registry
from verl_omni_core.errors import ConfigError, ContractError
from verl_omni_core.rewards import ocr
from verl_omni_core.rewards._combine import combine
from verl_omni_core.rewards._contract import Score, ScoringItem

GOLDEN = Path(__file__).parents[2] / "parity" / "rewards"
BLANK = np.zeros((3, 32, 96), dtype=np.uint8)


def picture(text: str, *, size: tuple[int, int] = (96, 32), fill: str = "black", ground: str = "white") -> np.ndarray:
    image = Image.new("RGB", size, ground)
    ImageDraw.Draw(image).text((8, 2), text, font=ImageFont.load_default(24), fill=fill)
    return np.asarray(image).transpose(2, 0, 1).copy()


def item(image: np.ndarray, prompt: str = "", ground_truth: str | None = None) -> ScoringItem:
    return ScoringItem(sample_id="s", image=image, prompt=prompt, ground_truth=ground_truth)


def scorer_reading(lines: list[tuple[str, float]]) -> ocr.OcrScorer:
    return ocr.OcrScorer(lambda _: lines, ocr.Options())


@pytest.fixture(scope="module")
def reader() -> ocr.OcrScorer:
    return ocr.build(registry.options("reward", "ocr", {}))


@pytest.mark.parametrize("case", json.loads((GOLDEN / "ocr_prompt.json").read_text())["cases"])
def test_score_of_read_lines_equals_flow_grpo(case: dict) -> None:
    if case.get("ocr_lines") == "__raise__":

        def fail(pixels: np.ndarray) -> list[tuple[str, float]]:
            raise RuntimeError("recogniser broke")

        with pytest.raises(RuntimeError, match="recogniser broke"):
            ocr.OcrScorer(fail, ocr.Options()).score([item(BLANK, case["prompt"])])
        values, _ = combine({"ocr": [Score(None, "recogniser broke")]}, {"ocr": 1.0}, missing="zero")
        assert values.tolist() == [case["reward"]]
        return
    lines = [(text, confidence) for text, confidence in case["ocr_lines"] or []]
    (score,) = scorer_reading(lines).score([item(BLANK, case["prompt"])])
    if "error" in case:
        assert score.value is None
        assert "quoted" in str(score.error)
    else:
        assert score.value == pytest.approx(case["reward"], abs=1e-9)
        assert score.error is None


@pytest.mark.parametrize("case", json.loads((GOLDEN / "ocr_genrm.json").read_text())["cases"])
def test_text_score_equals_verl_omni_where_only_spaces_are_white(case: dict) -> None:
    text, target = ("".join(case[side].split()) for side in ("recognised", "target"))
    assert ocr.text_score(text, target) == pytest.approx(case["genrm_ocr_score"], abs=1e-9)


def test_ground_truth_wins_over_the_quoted_span() -> None:
    assert ocr.wanted_text('a sign "Hello"', "World") == "World"
    assert ocr.wanted_text('a sign "Hello" and "Other"', None) == "Hello"
    assert ocr.wanted_text('a sign "Hello', None) is None


def test_full_width_letters_are_errors_unless_normalised() -> None:
    assert ocr.text_score("ＡＢ", "AB") == 0.0
    assert ocr.text_score("ＡＢ", "AB", normalize=True) == 1.0


@given(st.text(), st.text(min_size=1))
def test_score_lies_in_the_declared_range_and_is_one_for_a_contained_target(text: str, target: str) -> None:
    low, high = ocr.OcrScorer.RANGE
    assert low <= ocr.text_score(text, target) <= high
    if target.replace(" ", ""):
        assert ocr.text_score(text + target + text, target) == 1.0


def test_rapidocr_reads_rendered_text(reader: ocr.OcrScorer) -> None:
    image = picture("AB3K")
    perfect, wrong = reader.score([item(image, ground_truth="AB3K"), item(image, 'the word "ABXY"')])
    assert perfect == Score(1.0, extra={"text": "AB3K", "acc": 1.0, "read_length": 4.0})
    assert wrong.value == 0.5
    assert wrong.extra["acc"] == 0.0


def test_rapidocr_reads_coloured_text_and_nothing_in_a_blank_picture(reader: ocr.OcrScorer) -> None:
    coloured, blank, wanted_blank = reader.score(
        [
            item(picture("HELLO", fill="yellow", ground="navy"), ground_truth="hello"),
            item(BLANK, ground_truth="hello"),
            item(BLANK, ground_truth=""),
        ]
    )
    assert coloured.value == 1.0
    assert blank.value == 0.0
    assert blank.extra["text"] == ""
    assert wanted_blank.value == 1.0


def test_a_batch_scores_like_its_items_one_by_one(reader: ocr.OcrScorer) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (3, 32, 96), dtype=np.uint8)
    items = [item(picture(text), ground_truth="AB3K") for text in ("AB3K", "QX7", "HELLO")] + [item(noise, '"Z"')]
    assert reader.score(items) == [reader.score([one])[0] for one in items] == reader.score(items)


def test_line_detection_reads_two_lines() -> None:
    image = Image.new("RGB", (256, 128), "white")
    draw = ImageDraw.Draw(image)
    draw.text((20, 8), "HELLO", font=ImageFont.load_default(40), fill="black")
    draw.text((20, 68), "WORLD", font=ImageFont.load_default(40), fill="black")
    options = registry.options("reward", "ocr", {"recognition_only": False, "upscale": 1})
    (score,) = ocr.build(options).score([item(np.asarray(image).transpose(2, 0, 1), ground_truth="hello world")])
    assert score.value == 1.0


def test_loading_and_reading_log_nothing(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ocr.build(ocr.Options()).score([item(BLANK, ground_truth="A")])
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""
    assert not caplog.records


@pytest.mark.parametrize(
    "image", [np.zeros((3, 8, 8), np.float32), np.zeros((8, 8, 3), np.uint8), np.zeros((2, 3, 8, 8), np.uint8)]
)
def test_other_pictures_than_uint8_chw_are_refused(image: np.ndarray) -> None:
    with pytest.raises(ContractError, match="uint8 picture"):
        scorer_reading([]).score([item(image, ground_truth="A")])


def test_options_have_bounds() -> None:
    with pytest.raises(ConfigError, match="upscale"):
        registry.options("reward", "ocr", {"upscale": 0})
    with pytest.raises(ConfigError, match="did you mean 'upscale'"):
        registry.options("reward", "ocr", {"upscal": 2})
