import pyarrow as pa
import pytest

from verl_omni_core.batches.schema import check_schema
from verl_omni_core.errors import ContractError
from verl_omni_core.rewards._contract import Score
from verl_omni_core.rewards._tables import score_table, scores_of, summary_table
from verl_omni_core.settings.reward import RewardSettings

SETTINGS = RewardSettings(scorers=[{"name": "ocr"}, {"name": "jpeg_size", "weight": 0.5}])
SCORES = [
    {"ocr": Score(0.5, extra={"text": "AB", "acc": 0.0}, attempts=2, latency_s=0.1), "jpeg_size": Score(-1.0)},
    {"ocr": Score(None, "broke", timed_out=True), "jpeg_size": Score(-2.0)},
]
SAMPLES = pa.table(
    {
        "sample_index": pa.array([4, 5], pa.int64()),
        "sample_id": ["u-g0", "u-g1"],
        "uid": ["u", "u"],
        "session": pa.array([0, 1], pa.int32()),
    }
)


def long_table() -> pa.Table:
    versions = {"ocr": "1", "jpeg_size": "2"}
    return score_table("scores", [4, 5], ["u-g0", "u-g1"], SCORES, SETTINGS, versions)


def test_scores_survive_the_table() -> None:
    table = long_table()
    check_schema(table, "scores")
    assert table.num_rows == 4
    assert scores_of(table) == {"u-g0": SCORES[0], "u-g1": SCORES[1]}
    assert table["status"].to_pylist() == ["ok", "ok", "timeout", "ok"]
    assert table["scorer_version"].to_pylist() == ["1", "2", "1", "2"]


def test_the_summary_has_one_reward_a_sample_and_none_where_a_score_is_missing() -> None:
    table = summary_table(SAMPLES, SCORES, SETTINGS)
    check_schema(table, "reward_summary")
    assert table["rm_score"].to_pylist() == [0.0, None]
    assert table["valid"].to_pylist() == [True, False]
    assert table["acc"].to_pylist() == [0.0, None]
    assert table["reward/jpeg_size"].to_pylist() == [-1.0, -2.0]
    assert "reward/ocr/text" not in table.column_names


def test_a_step_without_samples_has_empty_tables() -> None:
    assert score_table("rewards", [], [], [], SETTINGS, {}).num_rows == 0
    assert summary_table(SAMPLES.slice(0, 0), [], SETTINGS).num_rows == 0


def test_scores_of_other_samples_are_refused() -> None:
    with pytest.raises(ContractError, match="1 scores for 2 samples"):
        summary_table(SAMPLES, SCORES[:1], SETTINGS)
