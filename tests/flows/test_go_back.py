"""A run goes back to a step and makes the same bits again; on the reference engine, which starts sooner."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.flows import small
from tests.flows.conftest import Ran
from verl_omni_core.online import train
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.ending import end_run
from verl_omni_core.store.ledger import Ledger, standing

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STEPS = 3


@pytest.fixture
def config(home: Path, tmp_path: Path) -> Iterator[RunConfig]:
    """Four prompts, six a step: an epoch ends within the first step, and another with the second."""
    prompts = tmp_path / "four.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f'"{w}"', "ground_truth": w}) + "\n" for w in ("AB", "CD", "E", "F"))
    )
    quick = {"rollout__name": "diffusers", "run__validate_before": "false", "run__images_every": 0}
    yield small.settings("a", tmp_path, run__steps=STEPS, data__train=prompts, data__max_validation_prompts=1, **quick)
    end_run("a", tmp_path)


def _bits(ran: Ran) -> dict[int, tuple[str, bytes, list[int]]]:
    run = ran.recorded
    return {
        step: (run.checksum(step), np.ascontiguousarray(run.latents(step)).tobytes(), run.seeds(step))
        for step in range(1, STEPS + 1)
    }


def test_a_finished_run_that_goes_back_to_a_step_makes_the_same_bits_again(config: RunConfig) -> None:
    ran = Ran(config, train(config))
    whole, drawn = _bits(ran), ran.requests()
    attempts = {step: ran.recorded.ref(step, "update").attempt for step in whole}
    back = config.model_copy(update={"run": config.run.model_copy(update={"resume": 1})})
    ran.summary = train(back)
    assert _bits(ran) == whole
    assert {step for step in whole if ran.recorded.ref(step, "update").attempt != attempts[step]} == {2, 3}
    assert ran.requests() == [
        drawn[0] + 2 * small.SAMPLES + 2
    ]  # two steps, and the last held-out samples of one prompt
    ran.end()  # a new trainer loads the state after the second step
    back = config.model_copy(update={"run": config.run.model_copy(update={"resume": 2})})
    ran.summary = train(back)
    assert _bits(ran) == whole
    records = Ledger(ran.root).records()
    assert [r["kind"] for r in records] == ["opt"] * 3 + ["rewind"] + ["opt"] * 2 + ["rewind", "opt"]
    assert [r["update_id"] for r in standing(records)] == [f"{step:06d}/0000" for step in whole]
