"""A run that nobody named is called after its flow run."""

import pytest

from tasks.run import named_run
from verl_omni_core.settings.run import RunConfig


def test_a_retry_of_a_flow_run_names_the_run_that_it_began(monkeypatch):
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "0af76519-16cd-43dd-8448-eb211c80319c")
    names = {named_run(RunConfig(), None).run.id for _ in range(2)}
    assert names == {"online-0af76519-16cd"}
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "1af76519-16cd-43dd-8448-eb211c80319c")
    assert named_run(RunConfig(), []).run.id == "online-1af76519-16cd"


@pytest.mark.parametrize("overrides", [["run.id=mine"], ["run.id=mine", "run.steps=3"]])
def test_a_name_that_was_given_stays(monkeypatch, overrides):
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "0af76519-16cd-43dd-8448-eb211c80319c")
    assert named_run(RunConfig(), overrides).run.id == "mine"
    given = RunConfig.model_validate({"run": {"id": "given"}})
    assert named_run(given, None).run.id == "given"


def test_outside_of_a_flow_run_the_name_is_left_to_the_store(monkeypatch):
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID", raising=False)
    assert named_run(RunConfig(), None).run.id is None
