"""Every flow has a deployment, and every deployment a flow with a form."""

from pathlib import Path

import prefect.flows
import pytest
import yaml
from prefect.utilities.callables import parameter_schema

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = {entry["name"]: entry for entry in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
FLOWS = sorted(path.stem for path in (ROOT / "flows").glob("*.py") if path.stem != "__init__")


def test_every_flow_has_a_deployment_and_no_deployment_lacks_a_flow():
    assert sorted(DEPLOYMENTS) == FLOWS


@pytest.mark.parametrize("name", FLOWS)
def test_a_deployments_entrypoint_is_its_flow(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    entry = DEPLOYMENTS[name]
    assert entry["entrypoint"] == f"flows/{name}.py:{name}"
    flow = prefect.flows.load_flow_from_entrypoint(entry["entrypoint"])
    assert isinstance(flow, prefect.flows.Flow) and flow.name == name
    assert entry["work_pool"]["name"] == "gpu-host" and entry["schedules"] == []


@pytest.mark.parametrize("name", FLOWS)
def test_every_parameter_has_a_place_in_the_form_and_says_what_it_is(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    schema = parameter_schema(prefect.flows.load_flow_from_entrypoint(DEPLOYMENTS[name]["entrypoint"]))
    assert schema.properties and all(entry.get("description") for entry in schema.properties.values())
