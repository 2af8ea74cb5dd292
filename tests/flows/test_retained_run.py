"""A run that lets old steps' files go, and loses all its actors, learns the same bits as one that keeps everything."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.flows import small
from tests.flows.conftest import Ran
from verl_omni_core.errors import StoreError
from verl_omni_core.online import train
from verl_omni_core.stages.gc import gc
from verl_omni_core.store.verification import verify_run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STEPS = range(1, small.STEPS + 1)


@pytest.fixture(scope="module")
def retained(home: Path, store: Path) -> Iterator[Ran]:
    """The small run with as little kept as may be; its actors die before the last update.

    The last snapshot by then is two steps old, so one step is trained again from its stored batches.
    """
    limits = {"trajectory_steps": 0, "media_share": 0.0, "checkpoints": 1, "weight_steps": 1}
    changes = {f"durability__retention__{name}": value for name, value in limits.items()}
    level = {"durability__level": "ledger", "durability__snapshot_every": 2}
    ran = Ran(small.settings("retained", store, **changes, **level), "")
    try:
        with small.before(small.STEPS, "update", small.stop), pytest.raises(small.Stopped):
            train(ran.config)
        ran.end()
        ran.summary = train(ran.config)
        yield ran
    finally:
        ran.end()


def keeps_samples(ran: Ran, step: int) -> bool:
    try:
        ran.recorded.latents(step)
    except StoreError as error:
        if "deleted by retention" not in str(error):
            raise
        return False
    return True


def test_a_run_that_lets_old_steps_go_and_is_resumed_ends_with_the_bits_of_one_that_keeps_all(flow: Ran, retained: Ran):
    for step in STEPS:
        assert np.array_equal(flow.recorded.rewards(step), retained.recorded.rewards(step))
        assert flow.recorded.checksum(step) == retained.recorded.checksum(step), f"step {step}"


def test_what_the_newest_snapshot_needs_stayed_and_the_rest_went(retained: Ran):
    assert [step for step in STEPS if keeps_samples(retained, step)] == [3, 4]
    assert verify_run(retained.root).problems == []


def test_once_the_run_is_finished_gc_takes_what_its_last_snapshot_has_made_needless(retained: Ran):
    retained.end()
    done = gc("retained", retained.root.parent)
    assert done.verified_step == small.STEPS and done.bytes > 0
    assert not any(keeps_samples(retained, step) for step in STEPS)
    found = verify_run(retained.root)
    assert found.problems == [] and found.collected > 0
    assert gc("retained", retained.root.parent).bytes == 0
