"""The flow and plain Python, one and two replicas, whole and interrupted: the same bits."""

import json

import numpy as np
import pytest

from tests.flows import small
from tests.flows.conftest import Broken, Ran

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STEPS = range(1, small.STEPS + 1)


def test_flow_and_plain_runs_with_one_seed_give_bit_equal_rewards(flow: Ran, plain: tuple[Ran, Broken]) -> None:
    for step in STEPS:
        assert np.array_equal(flow.recorded.rewards(step), plain[0].recorded.rewards(step))
    rewards = np.concatenate([flow.recorded.rewards(step) for step in STEPS])
    assert len(rewards) == small.SAMPLES * small.STEPS and len(set(rewards)) > 2


def test_flow_and_plain_runs_with_one_seed_give_bit_equal_weights(flow: Ran, plain: tuple[Ran, Broken]) -> None:
    for step in (0, *STEPS):
        assert flow.recorded.checksum(step) == plain[0].recorded.checksum(step), f"step {step}"
    for step in (0, small.STEPS):
        assert flow.recorded.checksum(step, "sync-average") == plain[0].recorded.checksum(step, "sync-average")
    assert len({flow.recorded.checksum(step) for step in (0, *STEPS)}) > 2


def test_the_run_keeps_where_its_settings_came_from(flow: Ran) -> None:
    origins = json.loads((flow.root / "settings_origins.json").read_text())
    assert origins["profile"] == small.DEMO and origins["sampler.noise_level"] == f"profile {small.DEMO}"
    assert origins["run.steps"] == f"--set run.steps={small.STEPS}" and origins["run.seed"] == "default"


def test_one_and_two_replicas_give_the_same_latents_and_pictures(flow: Ran, plain: tuple[Ran, Broken]) -> None:
    one, two = flow.recorded, plain[0].recorded
    for step in STEPS:
        assert one.latents(step).equal(two.latents(step))
        assert one.pixels(step, "rollout").equal(two.pixels(step, "rollout"))
    drew = {name for step in STEPS for name in two.table(step, "rollout", "trajectories")["replica"].to_pylist()}
    assert drew == {"replica-0", "replica-1"}


def test_validation_gives_the_same_numbers(flow: Ran, plain: tuple[Ran, Broken]) -> None:
    for step in (0, small.STEPS):
        assert np.array_equal(flow.recorded.rewards(step, "validate"), plain[0].recorded.rewards(step, "validate"))


def test_more_steps_go_on_with_living_actors(plain: tuple[Ran, Broken]) -> None:
    assert plain[1].trainer_before == plain[1].trainer_resumed


def test_killed_replicas_and_workers_were_rebuilt_within_the_run(plain: tuple[Ran, Broken]) -> None:
    before, after = plain[1].pools
    assert set(before) == set(after) == {"replica-0", "replica-1", "reward-0", "rollout-0"}
    assert {name for name in before if before[name] == after[name]} == {"rollout-0"}
    scores = plain[0].recorded.table(3, "rollout", "scores")
    assert set(scores["status"].to_pylist()) == {"ok"}


def test_each_optimizer_step_is_in_the_ledger_once(flow: Ran, plain: tuple[Ran, Broken]) -> None:
    from verl_omni_core.store.ledger import Ledger

    for ran in (flow, plain[0]):
        updates = [record["update_id"] for record in Ledger(ran.root).records()]
        assert updates == [f"{step:06d}/0000" for step in STEPS]


def test_ratio_stays_within_1e_5_of_1_on_the_first_mini_batch_of_every_step(
    flow: Ran, plain: tuple[Ran, Broken]
) -> None:
    for ran in (flow, plain[0]):
        for step in STEPS:
            assert ran.recorded.metrics(step)["actor/first_ratio_deviation"] <= 1e-5


def test_a_finished_run_is_not_done_again_even_without_prefects_database(
    flow: Ran, home: object, fresh_prefect: None
) -> None:
    from tests.flows.conftest import command_line

    requests, commits = flow.requests(), flow.recorded.commits()
    arguments = [part for item in small.overrides("flow", flow.root.parent) for part in ("--set", item)]
    again, _ = command_line(home, ["train", small.DEMO, *arguments])  # type: ignore[arg-type]
    assert flow.requests() == requests and flow.recorded.commits() == commits
    assert _result(again) == _result(flow.summary) and len(_result(again)) == 2


def _result(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("Held-out reward:", "Gain:"))]
