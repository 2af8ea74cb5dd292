"""Two policies are compared only on the same held-out prompts."""

import json
import logging
from pathlib import Path

import pyarrow as pa
import pytest

from verl_omni_core.batches import columns
from verl_omni_core.data.prompts import read_prompts
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.comparison import held_out, picture_pairs
from verl_omni_core.stages.plan import prompt_table
from verl_omni_core.stages.session import RunRef, Session
from verl_omni_core.store.artifacts import RunStore

CONFIG = RunConfig.model_validate({"sampler": {"validation": {"samples_per_prompt": 1}}})


def _validate(store: RunStore, step: int, prompts: list[str], rewards: list[float]) -> None:
    file = Path(store.root) / f"{step}.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    read = read_prompts(file, prompt_column="prompt", negative_prompt_column=None, ground_truth_column=None)
    rows = prompt_table(CONFIG, read, prompts, [0] * len(prompts), dataset="held out")
    drawn = store.attempt(step, "validate-samples", "key")
    drawn.commit([drawn.write_table("prompts", 0, rows)], rows=len(rows), parents=[], producer={})
    judged = store.attempt(step, "validate", "key")
    summary = pa.table({columns.RM_SCORE: pa.array(rewards, pa.float64())})
    judged.commit([judged.write_table("reward_summary", 0, summary)], rows=len(rewards), parents=[], producer={})


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(RunRef(str(tmp_path), 0), CONFIG, RunStore(tmp_path), actors=None)


def test_rewards_of_the_same_prompts_are_paired(session):
    _validate(session.store, 0, ["a", "b"], [0.0, 0.5])
    _validate(session.store, 3, ["a", "b"], [0.5, 1.0])
    compared = held_out(session)
    assert (compared.base, compared.trained, compared.low, compared.high) == (0.25, 0.75, 0.5, 0.5)


@pytest.mark.parametrize("others", [["a", "c"], ["b", "a"], ["a", "b", "c"]])
def test_rewards_of_other_prompts_are_not_paired(session, others, caplog):
    _validate(session.store, 0, ["a", "b"], [0.0, 0.5])
    _validate(session.store, 3, others, [0.5] * len(others))
    with caplog.at_level(logging.WARNING):
        assert held_out(session) is None and picture_pairs(session, 1) == []
    assert "held-out prompts changed under the run" in caplog.text
