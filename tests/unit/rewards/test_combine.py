import json
from pathlib import Path

import numpy as np
import pytest

from verl_omni_core.errors import ConfigError, ContractError
from verl_omni_core.rewards import jpeg_size, ocr
from verl_omni_core.rewards._combine import combine, extras
from verl_omni_core.rewards._contract import Score, ScoringItem

GOLDEN = Path(__file__).parents[2] / "parity" / "rewards"
MULTI = json.loads((GOLDEN / "multi_reward.json").read_text())["cases"]


def scores_of(functions: dict) -> tuple[dict[str, Score], dict[str, float]]:
    scores, weights = {}, {}
    for name, function in functions.items():
        returned = function["returns"]
        weights[name] = function.get("weight", 1.0)
        if returned == "__raise__":
            scores[name] = Score(None, "raised")
        elif isinstance(returned, dict):
            scores[name] = Score(returned["score"], extra={k: v for k, v in returned.items() if k != "score"})
        else:
            scores[name] = Score(float(returned))
    return scores, weights


@pytest.mark.parametrize("case", [case for case in MULTI if "result" in case])
def test_sum_and_extras_equal_verl_omni_where_missing_counts_as_zero(case: dict) -> None:
    scores, weights = scores_of(case["functions"])
    values, valid = combine({name: [score] for name, score in scores.items()}, weights, missing="zero")
    assert values.tolist() == [pytest.approx(case["result"]["reward_score"], abs=1e-9)]
    assert valid.tolist() == [True]
    assert extras(scores, weights, missing="zero") == pytest.approx(case["result"]["reward_extra_info"], abs=1e-9)


@pytest.mark.parametrize(
    "functions", [{}, {"a": {"weight": 0.0, "returns": 1.0}}, {"a": {"weight": -1, "returns": 1.0}}]
)
def test_weights_without_a_positive_sum_are_refused(functions: dict) -> None:
    scores, weights = scores_of(functions)
    with pytest.raises(ConfigError, match="positive"):
        combine({name: [score] for name, score in scores.items()}, weights)


def test_a_missing_score_makes_its_sample_invalid_and_no_other() -> None:
    scores = {"a": [Score(0.5), Score(None, "timeout"), Score(1.0)], "b": [Score(2.0), Score(2.0), Score(4.0)]}
    values, valid = combine(scores, {"a": 1.0, "b": 0.25})
    assert valid.tolist() == [True, False, True]
    assert values[[0, 2]].tolist() == [1.0, 2.0]
    assert np.isnan(values[1])


def test_a_score_that_is_not_finite_is_invalid() -> None:
    values, valid = combine({"a": [Score(float("inf")), Score(1.0)]}, {"a": 1.0})
    assert valid.tolist() == [False, True]
    assert values[1] == 1.0


def test_extras_of_an_incomplete_sample_have_no_combined_reward() -> None:
    found = extras({"a": Score(None, "timeout"), "b": Score(1.0, extra={"acc": 1.0})}, {"a": 1.0, "b": 1.0})
    assert found == {"reward/b": 1.0, "reward/b/acc": 1.0}


def test_scorers_that_scored_different_samples_are_refused() -> None:
    with pytest.raises(ContractError, match="equally many"):
        combine({"a": [Score(1.0)], "b": []}, {"a": 1.0, "b": 1.0})
    with pytest.raises(ContractError, match=r"\['a', 'b'\]"):
        combine({"a": [Score(1.0)]}, {"a": 1.0, "b": 1.0})


@pytest.mark.parametrize("case", json.loads((GOLDEN / "weighted_scores.json").read_text())["cases"])
def test_two_real_scorers_add_up_as_in_flow_grpo(case: dict) -> None:
    from PIL import Image

    items = [
        ScoringItem(str(i), np.asarray(Image.open(GOLDEN / "images" / name).convert("RGB")).transpose(2, 0, 1), prompt)
        for i, (name, prompt) in enumerate(zip(case["images"], case["prompts"], strict=True))
    ]
    lines = [(text, confidence) for text, confidence in case["ocr_lines"]]
    scores = {
        "jpeg_compressibility": jpeg_size.build(jpeg_size.Options()).score(items),
        "ocr": ocr.OcrScorer(lambda _: lines, ocr.Options()).score(items),
    }
    for name, column in scores.items():
        assert [score.value for score in column] == pytest.approx(case["details"][name], rel=0.02)
    values, valid = combine(scores, case["weights"])
    assert values.tolist() == pytest.approx(case["details"]["avg"], rel=0.02)
    assert valid.all()
