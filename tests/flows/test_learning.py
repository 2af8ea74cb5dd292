"""The demo's model gets better: a third of the demo's steps, a quarter of its held-out prompts."""

import numpy as np
import pytest

from tests.flows.conftest import command_line
from tests.flows.recorded import Recorded
from tests.flows.small import DEMO
from verl_omni_core.metrics.validation import paired_bootstrap

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STEPS, PROMPTS, SAMPLES = 9, 32, 4
CHANGES = {
    "run.steps": STEPS,
    "run.validate_every": 0,
    "run.checkpoint_every": 0,
    "run.images_every": 0,
    "training.epochs_per_step": 2,
    "data.max_validation_prompts": PROMPTS,
    "durability.min_free_gb": 0.1,
}


def test_held_out_reward_rises_by_0_10_with_its_interval_above_0_05(home, store) -> None:
    changes = {"run.id": "learning", "run.store": store, **CHANGES}
    output, _ = command_line(
        home, ["train", DEMO, *(part for name, value in changes.items() for part in ("--set", f"{name}={value}"))]
    )
    run = Recorded(store / "learning")
    before, after = (run.rewards(step, "validate").reshape(PROMPTS, SAMPLES) for step in (0, STEPS))
    assert 0.4 <= np.mean(before) <= 0.7
    gain = paired_bootstrap(before, after)
    assert gain.mean >= 0.10 and gain.low > 0.05, gain
    assert f"{np.mean(after):.3f} after training" in output
