"""What a run logged comes out again from what it left on disk: no actor, no engine."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.flows import small
from tests.flows.conftest import Ran
from verl_omni_core.batches.tables import read_tensor
from verl_omni_core.metrics.rl import advantage_metrics, reward_metrics
from verl_omni_core.rewards._contract import ScoringItem
from verl_omni_core.settings.resolve import algorithm_options, component
from verl_omni_core.stages.advantage import rewards_of
from verl_omni_core.stages.update import mini_batches
from verl_omni_core.workers.actor_rollout_ref import ActorRolloutRefWorker
from verl_omni_core.workers.commands import UpdateCommand
from verl_omni_core.workers.reward_worker import RewardWorker

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STEPS = range(1, small.STEPS + 1)
ANY_EPOCH = 10**6


@pytest.fixture
def as_the_trainer_computes(flow: Ran) -> Iterator[ActorRolloutRefWorker]:
    """A trainer of the run's settings in this process, as it was before the first step."""
    threads = torch.get_num_threads()
    worker = ActorRolloutRefWorker(flow.config)
    worker.init_model()
    yield worker
    worker.close()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def test_rewards_computed_again_from_stored_pictures_are_those_of_the_store(flow: Ran) -> None:
    run = flow.recorded
    prompts = {row["uid"]: row for row in run.table(1, "plan", "prompts").to_pylist()}
    media = run.table(1, "rollout", "media")
    items = [
        ScoringItem(sample_id, image, prompts[uid]["prompt"], prompts[uid]["ground_truth"])
        for sample_id, uid, image in zip(
            media["sample_id"].to_pylist(), media["uid"].to_pylist(), read_tensor(media, "pixels").numpy(), strict=True
        )
    ]
    scores = asyncio.run(RewardWorker(flow.config.reward).score(items))
    assert [scored["ocr"].value for scored in scores] == pytest.approx(run.rewards(1).tolist(), abs=1e-6)


def test_advantages_computed_again_from_committed_rewards_are_those_of_the_store(flow: Ran) -> None:
    run, algorithm = flow.recorded, component("algorithm", flow.config.algorithm.name)
    for step in STEPS:
        scores, groups, valid = rewards_of(run.table(step, "reward", "reward_summary"))
        values = algorithm.advantages(scores, groups, valid, algorithm_options(flow.config))
        assert np.array_equal(values.numpy(), run.table(step, "advantage", "advantages")["advantage"].to_numpy())
        logged = run.metrics(step)
        for name, value in (reward_metrics(scores, groups, valid) | advantage_metrics(values, valid)).items():
            assert logged[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_an_update_computed_again_from_the_store_gives_the_logged_metrics_and_the_synced_weights(
    flow: Ran, as_the_trainer_computes: ActorRolloutRefWorker, tmp_path: Path
) -> None:
    """The first step from the base, and the step after a checkpoint from it."""
    run, worker = flow.recorded, as_the_trainer_computes
    after = flow.config.run.checkpoint_every
    for step in (1, after + 1):
        if step > 1:
            name = run.manifest(after, "checkpoint").files[0].name
            folder = run.store.path_of(run.ref(after, "checkpoint"), name).parent
            assert worker.load_checkpoint(str(folder)) == after
        command = UpdateCommand(
            root=str(flow.root),
            step=step,
            epoch=ANY_EPOCH,
            expected_version=step - 1,
            rollout=run.ref(step, "rollout"),
            advantages=run.ref(step, "advantage"),
            old_log_probs=None,
            reference=None,
            mini_batches=mini_batches(flow.config),
        )
        result, logged = worker.update_actor(command), run.metrics(step)
        assert {"actor/loss", "actor/first_ratio_deviation", "actor/grad_norm"} <= result.metrics.keys()
        for name, value in result.metrics.items():
            assert logged[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
        (recorded,) = [r for r in _ledger(flow) if r["step"] == step]
        assert recorded["batch_digest"] == result.records[0]["batch_digest"]
        assert worker.update_weights(str(tmp_path / str(step))).checksum == run.checksum(step)


def _ledger(ran: Ran) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((ran.root / "ledger").glob("*.json"))]
