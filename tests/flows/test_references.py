"""Tasks exchange references: small, and few of them a step."""

import importlib
import inspect
import json
import pkgutil
import typing
from collections import Counter

import pytest

import tasks
from tests.flows import small
from tests.flows.conftest import Ran
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.session import RunRef
from verl_omni_core.store.manifest import ArtifactRef

ALLOWED = {RunRef, ArtifactRef, RunConfig, int, str, type(None)}
MOST_TASKS_A_STEP = 12


def _all_tasks() -> dict[str, typing.Any]:
    modules = [importlib.import_module(f"tasks.{info.name}") for info in pkgutil.iter_modules(tasks.__path__)]
    return {
        value.name: value
        for module in modules
        for value in vars(module).values()
        if hasattr(value, "task_run_name") and hasattr(value, "fn")
    }


def _leaves(annotation: typing.Any) -> set[typing.Any]:
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return {type(value) for value in inner}
    return set().union(*map(_leaves, inner)) if inner else {annotation}


def test_tasks_take_and_return_references_settings_and_scalars_only() -> None:
    found = _all_tasks()
    assert len(found) >= 13
    for name, task in found.items():
        hints = typing.get_type_hints(task.fn)
        assert set(hints) == {*inspect.signature(task.fn).parameters, "return"}, name
        for annotation in hints.values():
            # an answer for a person is a small dictionary of JSON values
            allowed = ALLOWED | {float, bool, typing.Any} if annotation == hints["return"] else ALLOWED | {bool}
            assert _leaves(annotation) <= allowed, f"{name}: {annotation}"


def test_tasks_leave_caching_and_results_to_the_store() -> None:
    from prefect.cache_policies import NO_CACHE

    for name, task in _all_tasks().items():
        assert task.cache_policy == NO_CACHE, name
        assert task.persist_result is False, name


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_every_reference_of_a_run_is_smaller_than_1_kb(flow: Ran) -> None:
    run = flow.recorded
    refs = [run.ref(int(path.split("/")[1]), path.split("/")[2]) for path in run.commits()]
    assert len(refs) > 8 * small.STEPS
    assert max(len(json.dumps(ref.to_json())) for ref in refs) < 1000


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_step_has_at_most_12_task_runs_with_small_parameters(flow: Ran) -> None:
    rows = flow.task_runs
    assert {state for *_, state in rows} == {"COMPLETED"}
    a_step = Counter(name.partition("/")[0] for name, *_ in rows)
    assert {f"step-{step}" for step in range(small.STEPS + 1)} <= set(a_step)
    assert max(count for name, count in a_step.items() if name.startswith("step-")) <= MOST_TASKS_A_STEP
    assert max(len(inputs) for _, inputs, _ in rows) < 1000
