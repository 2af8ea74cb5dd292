"""What must hold of every run, whatever it met: no sample trained twice, no update lost, no batch of mixed versions."""

from collections.abc import Sequence

from tests.faults.size import GROUP, PROMPTS, SAMPLES, STEPS
from tests.flows.recorded import Recorded
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.update import mini_batches
from verl_omni_core.store.ledger import Ledger
from verl_omni_core.workers.commands import UpdateCommand


def assert_nothing_lost_or_doubled(run: Recorded, config: RunConfig, damaged: Sequence[tuple[int, str]] = ()) -> None:
    """Check a finished run by its ledger, its digests and its rows.

    Args:
        damaged: steps and stages whose files the test has damaged.
    """
    updates = [record for record in Ledger(run.root).records() if record["kind"] == "opt"]
    per_step = len(mini_batches(config))
    wanted = [f"{step:06d}/{number:04d}" for step in range(1, STEPS + 1) for number in range(per_step)]
    assert [record["update_id"] for record in updates] == wanted
    assert [record["batch_digest"] for record in updates] == [d for s in range(1, STEPS + 1) for d in _digests(run, s)]
    assert len({record["batch_digest"] for record in updates}) == len(updates)
    assert not [record for record in Ledger(run.root).records() if record["kind"] == "fork"]
    trained: list[str] = []
    for step in range(1, STEPS + 1):
        rows = run.table(step, "rollout", "trajectories")
        assert set(rows["min_version"].to_pylist()) == set(rows["max_version"].to_pylist()) == {step - 1}
        advantages = run.table(step, "advantage", "advantages")
        assert sorted(advantages["sample_id"].to_pylist()) == sorted(rows["sample_id"].to_pylist())
        trained += rows["sample_id"].to_pylist()
        indices = sorted(index for batch in mini_batches(config) for index in batch)
        assert indices == list(range(SAMPLES)) == rows["sample_index"].to_pylist()
    assert len(trained) == len(set(trained)) == SAMPLES * STEPS
    for path in run.root.glob("steps/*/*/COMMIT"):
        step, stage = int(path.parent.parent.name), path.parent.name
        if (step, stage) not in damaged:
            run.store.verify(run.ref(step, stage))


def weights_digest(run: Recorded) -> str:
    """Return the digests of the final weights and of their average."""
    return f"{run.checksum(STEPS)} {run.checksum(STEPS, 'sync-average')}"


def _digests(run: Recorded, step: int) -> list[str]:
    """Return the digest of each of a step's batches, one prompt each, as its committed tables have it."""
    command = UpdateCommand(
        root=str(run.root),
        step=step,
        epoch=0,
        expected_version=step - 1,
        rollout=run.ref(step, "rollout"),
        advantages=run.ref(step, "advantage"),
        old_log_probs=run.ref(step, "old_log_probs"),
        reference=run.ref(step, "reference"),
        mini_batches=[list(range(first * GROUP, (first + 1) * GROUP)) for first in range(PROMPTS)],
    )
    return [command.batch_digest(number) for number in range(PROMPTS)]
