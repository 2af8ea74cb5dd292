"""A fork of a real run, started by its command; on the reference engine, which starts sooner."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.flows import small
from tests.flows.conftest import Ran, command_line
from tests.flows.test_resume import quick_settings
from tests.unit.stages.forked_run import tree
from verl_omni_core.online import train
from verl_omni_core.stages.ending import end_run
from verl_omni_core.stages.trained import config_of
from verl_omni_core.store.ledger import Ledger
from verl_omni_core.store.runs import list_runs, open_run

pytestmark = [pytest.mark.full, pytest.mark.engine, pytest.mark.timeout(900)]

BASE, STEPS = 2, 4


@pytest.fixture(scope="module")
def store(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("forked")
    yield folder
    for run in list_runs(folder):
        end_run(run.run_id, folder)


@pytest.fixture(scope="module")
def parent(store: Path) -> Ran:
    config = quick_settings(store, run__steps=STEPS, run__validate_before="true", cluster__keep_actors="false")
    return Ran(config, train(config))


@pytest.fixture(scope="module")
def child(home: Path, parent: Ran) -> Ran:
    before = tree(parent.root)
    arguments = ["fork", "a", "--store", str(parent.root.parent), "--step", str(BASE), "--run-id", "b", "--start"]
    printed, _ = command_line(home, arguments)
    assert tree(parent.root) == before
    return Ran(config_of(open_run(parent.root.parent, "b")), printed)


def test_a_fork_with_the_parents_settings_draws_and_trains_what_the_parent_did_bit_for_bit(parent, child):
    for step in range(BASE + 1, STEPS + 1):
        assert np.array_equal(child.recorded.rewards(step), parent.recorded.rewards(step))
        assert child.recorded.latents(step).equal(parent.recorded.latents(step))
        assert child.recorded.checksum(step) == parent.recorded.checksum(step), f"step {step}"
    assert parent.recorded.checksum(BASE) != parent.recorded.checksum(STEPS)
    assert np.array_equal(child.recorded.rewards(STEPS, "validate"), parent.recorded.rewards(STEPS, "validate"))


def test_a_fork_numbers_its_steps_on_and_has_only_its_own_in_the_ledger(parent, child):
    assert [record["step"] for record in Ledger(child.root).records()] == list(range(BASE + 1, STEPS + 1))
    own = [step for step in child.recorded.store.steps() if child.recorded.store.find(step, "rollout") is not None]
    assert own == list(range(BASE + 1, STEPS + 1))
    assert child.recorded.metrics(STEPS)["training/global_step"] == STEPS


def test_a_fork_reports_its_gain_over_the_base_that_the_parent_judged(parent, child):
    def told(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith(("Held-out reward:", "Gain:"))]

    assert told(child.summary) == told(parent.summary) and len(told(child.summary)) == 2


def test_runs_lists_where_a_fork_comes_from(home, parent, child):
    printed, _ = command_line(home, ["runs", "--store", str(parent.root.parent)])
    lines = {line.split()[0]: line.split() for line in printed.splitlines()}
    assert lines["b"][-1] == f"a@{BASE}" and lines["a"][-1] == "-"
    assert lines["b"][3] == lines["a"][3] == f"{STEPS}/{STEPS}"


def test_a_fork_that_breaks_off_and_loses_its_actors_ends_with_the_parents_bits(home, parent):
    from verl_omni_core.stages.fork import fork

    made = fork("a", store=parent.root.parent, step=BASE, new_id="c")
    ran = Ran(made.config, "")
    with small.before(STEPS, "update", small.stop), pytest.raises(small.Stopped):
        train(made.config)
    ran.end()
    train(made.config)
    assert ran.recorded.checksum(STEPS) == parent.recorded.checksum(STEPS)
    assert len(Ledger(ran.root).records()) == STEPS - BASE
