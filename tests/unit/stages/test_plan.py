"""A plan stands for the prompts that it was drawn from, not for their file's name."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from verl_omni_core.data.prompts import digest_of
from verl_omni_core.errors import StoreError
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.plan import plan
from verl_omni_core.stages.session import RunRef, Session, let_go, register
from verl_omni_core.store.artifacts import RunStore

COLUMNS = {"prompt": ["a", "b", "c"], "ground_truth": ["A", "B", None]}


def _write(path: Path, truths: list[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": "draw", "ground_truth": truth}) + "\n" for truth in truths))


def _open(root: Path, prompts: Path) -> RunRef:
    config = RunConfig.model_validate({"data": {"train": str(prompts), "prompts_per_step": 2}})
    let_go(str(root))
    return register(Session(RunRef(str(root), 1), config, RunStore(root, epoch=1), actors=None)).ref


def test_other_prompts_under_the_same_file_name_are_not_planned_as_the_same(tmp_path):
    root, prompts = tmp_path / "run", tmp_path / "prompts.jsonl"
    root.mkdir()
    _write(prompts, ["A", "B"])
    planned = plan(_open(root, prompts), 1)
    assert plan(_open(root, prompts), 1) == planned
    _write(prompts, ["A", "C"])
    with pytest.raises(StoreError, match=r"'plan' of step 1 is committed under key .*settings and prompts"):
        plan(_open(root, prompts), 1)


def test_the_digest_of_prompts_is_that_of_their_rows_in_order():
    table = pa.table(COLUMNS)
    assert digest_of(table) == digest_of(pa.concat_tables([table.slice(0, 1), table.slice(1)]))
    assert digest_of(table) != digest_of(table.take([1, 0, 2]))
    assert digest_of(table) != digest_of(pa.table({**COLUMNS, "ground_truth": ["A", "B", "C"]}))
