"""What the cases share: a Ray head whose actors can meet faults, a Prefect server, an undisturbed run, the results."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from tests.faults import page
from tests.faults.page import Outcome
from tests.faults.proof import assert_nothing_lost_or_doubled, weights_digest
from tests.faults.subject import Subject, environment, settings
from tests.project.collected import ROOT
from verl_omni_core.cluster import prefect_server, ray_head, services
from verl_omni_core.cluster.start import start
from verl_omni_core.settings.run import ClusterSettings

INJECTED = Path(__file__).with_name("injected")
RECORD = "RECORD_FAULTS"
"""Set by ``make test-faults``: the results go into the page."""
_outcomes: list[Outcome] = []


def pytest_sessionfinish() -> None:
    if os.environ.get(RECORD) and _outcomes:
        page.record(_outcomes)


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Services of this folder's own; actors import what injects faults. Whatever happens, they end with the tests."""
    folder = tmp_path_factory.mktemp("services")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_OMNI_HOME", str(folder))
        for name in ("RAY_ADDRESS", "PREFECT_API_URL", *prefect_server.environment()):
            patch.setenv(name, "")  # restored afterwards, as is what the start sets
            patch.delenv(name)
        try:
            with pytest.MonkeyPatch.context() as actors:
                actors.setenv("PYTHONPATH", os.pathsep.join([str(INJECTED), str(ROOT)]))
                actors.setenv("FAULTS_PLAN", str(folder / "plan.json"))
                start(ClusterSettings(object_store_mb=200), with_prefect=True, say=lambda line: None)
            yield folder
        finally:
            ray.shutdown()
            for name in (ray_head.NAME, prefect_server.NAME):
                services.stop(name)


@pytest.fixture(scope="package")
def subject_of(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Subject]]:
    """Makes the run of a group of cases; its processes and actors end with the tests."""
    store, subjects = tmp_path_factory.mktemp("runs"), []

    def make(name: str, *, store: Path = store, **changes: object) -> Subject:
        plan = home / "plan.json"
        subject = Subject(settings(name, store, **changes), plan, home / "started" / name, environment(home, plan))
        subjects.append(subject)
        return subject

    yield make
    for subject in subjects:
        subject.end()


@pytest.fixture(scope="package")
def undisturbed(subject_of: Callable[..., Subject]) -> str:
    """The digest of the weights with which a run ends that meets no fault."""
    subject = subject_of("undisturbed")
    subject.finish()
    assert_nothing_lost_or_doubled(subject.recorded, subject.config)
    subject.end()
    return weights_digest(subject.recorded)


@pytest.fixture(scope="package")
def outcome_of(undisturbed: str) -> Callable[..., Outcome]:
    """Makes, and keeps for the page, the result of a case once its run has finished."""

    def make(subject: Subject, case: str, struck: float, happened: str, *, packs: int | None = None) -> Outcome:
        outcome = Outcome(
            case,
            happened,
            round(subject.seconds_to_next_command(struck), 1),
            subject.packs_drawn_again(struck) if packs is None else packs,
            weights_digest(subject.recorded) == undisturbed,
        )
        _outcomes.append(outcome)
        return outcome

    return make
