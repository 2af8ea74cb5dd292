"""The demo at its stated scale."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.flows.conftest import command_line
from tests.flows.recorded import Recorded
from tests.flows.small import DEMO
from verl_omni_core.metrics.validation import paired_bootstrap

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.timeout(7200)]


class Demo:
    """The demo's run, its text, seconds and peak memory."""

    def __init__(self, home: Path, store: Path, name: str, *changes: str) -> None:
        given = [f"run.id={name}", f"run.store={store}", *changes]
        started = time.monotonic()
        arguments = [part for change in given for part in ("--set", change)]
        self.text, self.peak = command_line(home, ["train", DEMO, *arguments], timeout_s=3600)
        self.seconds = time.monotonic() - started
        self.run = Recorded(store / name)
        self.last = max(step for step in self.run.store.steps() if self.run.store.find(step, "validate"))

    def held_out(self, step: int) -> np.ndarray:
        return self.run.rewards(step, "validate").reshape(128, 4)

    def gain(self) -> float:
        return float(np.nanmean(self.held_out(self.last)) - np.nanmean(self.held_out(0)))


@pytest.fixture(scope="module")
def demo(home: Path, store: Path) -> Iterator[Demo]:
    yield Demo(home, store, "demo")


def test_held_out_reward_rises_by_0_10_with_its_interval_above_0_05(demo: Demo) -> None:
    assert demo.last >= 25
    assert not np.isnan(demo.held_out(0)).any() and not np.isnan(demo.held_out(demo.last)).any()
    assert 0.40 <= demo.held_out(0).mean() <= 0.65
    assert demo.gain() >= 0.10
    assert paired_bootstrap(demo.held_out(0), demo.held_out(demo.last)).low > 0.05


def test_demo_ends_in_time_and_memory(demo: Demo) -> None:
    assert demo.seconds <= 13 * 60  # the rest of a quarter of an hour is for the set-up
    assert demo.peak.total_bytes <= 8e9


def test_summary_names_report_and_picture_that_exist(demo: Demo) -> None:
    paths = [Path(found) for found in re.findall(r"\S+\.(?:html|png)", demo.text)]
    assert {path.suffix for path in paths} >= {".html", ".png"}
    assert all(path.is_file() for path in paths)


def test_ratio_stays_within_1e_5_of_1_in_every_step(demo: Demo) -> None:
    deviations = [demo.run.metrics(step)["actor/first_ratio_deviation"] for step in range(1, demo.last + 1)]
    assert max(deviations) <= 1e-5


def test_engines_own_count_is_the_number_of_samples(demo: Demo) -> None:
    (engine,) = json.loads((demo.run.root / "engine.json").read_text())["replicas"]
    assert engine["engine"] == "vllm_omni"
    assert engine["requests"] == demo.run.samples_drawn()


def test_shuffled_rewards_gain_less_than_0_03(home: Path, store: Path) -> None:
    control = Demo(home, store, "shuffled", "reward.shuffle=true", "run.steps=25")
    assert control.gain() < 0.03


def test_learning_rate_zero_reproduces_the_base_exactly(home: Path, store: Path) -> None:
    still = Demo(home, store, "still-demo", "training.learning_rate=0", "run.steps=2")
    assert np.array_equal(still.held_out(0), still.held_out(2))
    assert still.run.pixels(0, "validate-samples").equal(still.run.pixels(2, "validate-samples"))
    assert still.run.checksum(2) == still.run.checksum(0)


def test_two_demos_of_two_steps_give_equal_bits(home: Path, store: Path) -> None:
    changes = ["run.steps=2", "data.max_validation_prompts=4"]
    name = "again-{}"
    runs = []
    for index, replicas in enumerate((1, 2)):
        given = [f"run.id={name.format(index)}", f"run.store={store}", f"rollout.replicas={replicas}", *changes]
        command_line(home, ["train", DEMO, *(part for change in given for part in ("--set", change))])
        runs.append(Recorded(store / name.format(index)))
    for step in (1, 2):
        assert np.array_equal(runs[0].rewards(step), runs[1].rewards(step))
        assert runs[0].checksum(step) == runs[1].checksum(step)
