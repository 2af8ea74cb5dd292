"""One Ray head for the folder, and runs that several claims share; each run's actors end after its last use."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import ray

from benchmarks.memory import Footprint, Sampler, services_here
from tests.flows import small
from tests.flows.recorded import Recorded
from tests.object_store import ENVIRONMENT
from verl_omni_core.cluster import prefect_server, ray_head, services
from verl_omni_core.cluster.start import start
from verl_omni_core.online import train
from verl_omni_core.settings.run import ClusterSettings, RunConfig
from verl_omni_core.store.runs import open_run
from verl_omni_core.workers.actors import Actors
from verl_omni_core.workers.namespaces import end_actors

LIMIT_S = 480
_PROGRAM = """
import atexit, json, os, pathlib, sys
path = pathlib.Path(os.environ.pop("MODULES_AT_EXIT"))
atexit.register(lambda: path.write_text(json.dumps(sorted(sys.modules))))
from verl_omni_core.cli.main import app
app()
"""
"""The command; at its end it tells which modules it holds."""


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Ray head of this folder's own, in its own home; whatever happens, its services end with the folder's tests."""
    folder = tmp_path_factory.mktemp("services")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_OMNI_HOME", str(folder))
        patch.setenv("RAY_ADDRESS", "")  # restored afterwards, as is what the start sets
        patch.delenv("RAY_ADDRESS")
        for name, value in ENVIRONMENT.items():  # what Ray starts has the environment that Ray was started with
            patch.setenv(name, value)
        try:
            start(ClusterSettings(object_store_mb=200), with_prefect=False, say=lambda line: None)
            yield folder
        finally:
            ray.shutdown()
            for name in (ray_head.NAME, prefect_server.NAME):
                services.stop(name)


@pytest.fixture(scope="package")
def store(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@dataclass
class Ran:
    """A finished run whose actors live."""

    config: RunConfig
    summary: str
    peak: Footprint | None = None
    modules: list[str] = field(default_factory=list)
    """Modules that the command held at its end, where the run was one."""
    task_runs: list[tuple[str, str, str]] = field(default_factory=list)
    """What Prefect recorded, where the run was a flow: name, inputs and state of each task run."""

    @property
    def root(self) -> Path:
        return Path(self.config.run.store) / str(self.config.run.id)

    @property
    def recorded(self) -> Recorded:
        return Recorded(self.root)

    def actors(self) -> Actors:
        return Actors.find(self.config, open_run(self.root.parent, self.root.name), epoch=10**6)

    def requests(self) -> list[int]:
        """Return each engine's own count of finished requests."""
        return [int(engine["requests"]) for engine in self.actors().describe_engines()]

    def end(self) -> None:
        end_actors(self.config.cluster, self.root)


def command_line(home: Path, arguments: list[str], *, timeout_s: float = LIMIT_S) -> tuple[str, Footprint]:
    """Run ``verl-omni`` with ``arguments``; return what it printed and the peak memory of all that ran for it.

    ``modules.json`` in ``home`` then names the modules that the process held at its end.
    """
    modules = home / "modules.json"
    modules.unlink(missing_ok=True)
    environment = {**os.environ, "VERL_OMNI_HOME": str(home), "MODULES_AT_EXIT": str(modules)}
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    with Sampler(lambda: [process.pid, *services_here()]) as sampler:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    assert process.returncode == 0, output[-4000:]
    return output, sampler.peak


@pytest.fixture(scope="package")
def flow(home: Path, store: Path) -> Iterator[Ran]:
    """The demo, small, as a user starts it: command line, Prefect flow, one replica."""
    ran = Ran(small.settings("flow", store), "")
    arguments = [part for item in small.overrides("flow", store) for part in ("--set", item)]
    try:
        ran.summary, ran.peak = command_line(home, ["train", small.DEMO, *arguments])
        ran.modules = json.loads((home / "modules.json").read_text())
        ran.task_runs = recorded_task_runs(home, "flow")
        yield ran
    finally:
        ran.end()


def recorded_task_runs(home: Path, flow_run: str, *, timeout_s: float = 60) -> list[tuple[str, str, str]]:
    """Return the task runs of a finished flow run; the server writes them down a moment after they happened."""
    query = "select t.name, t.task_inputs, t.state_type from task_run t join flow_run f on f.id = t.flow_run_id"
    deadline = time.monotonic() + timeout_s
    while True:
        with closing(sqlite3.connect(f"file:{home}/prefect/prefect.db?mode=ro", uri=True)) as database:
            rows = database.execute(f"{query} where f.name = ?", (flow_run,)).fetchall()
        if {state for *_, state in rows} == {"COMPLETED"} and any(name.startswith("finish") for name, *_ in rows):
            return rows
        assert time.monotonic() < deadline, rows
        time.sleep(0.5)


@dataclass
class Broken:
    """How the plain run came to its end."""

    trainer_before: int
    trainer_resumed: int
    """Process ids of the trainer in the first piece of the run and in its continuation."""
    pools: list[dict[str, int]]
    """Process ids of replicas and workers, by name, at the same moments."""


@pytest.fixture(scope="package")
def plain(home: Path, store: Path) -> Iterator[tuple[Ran, Broken]]:
    """The same settings with two replicas as plain Python, in three pieces.

    One step; then, on the living actors, up to the moment before the last checkpoint, where the run stops and all
    actors are killed; then the rest from the last checkpoint and the stored batches. In the second piece one replica,
    then the reward worker, then both replicas are killed under the run.
    """
    name = "plain"
    first = small.settings(name, store, rollout__replicas=2, run__steps=1)
    whole = small.settings(name, store, rollout__replicas=2)
    ran = Ran(whole, "")
    pids: list[int] = []

    pools: list[dict[str, int]] = []

    def note() -> None:
        actors = ran.actors()
        pids.append(actors.trainer.states()[0].pid)
        pools.append(small.process_ids(actors.pools()))

    def note_and_stop() -> None:
        note()
        small.stop()

    try:
        train(first)
        note()
        with (
            small.before(2, "rollout", lambda: small.kill(ran.actors().pools(), "replica-0")),
            small.before(2, "reward", lambda: small.kill(ran.actors().pools(), "reward-0")),
            small.before(3, "rollout", lambda: small.kill(ran.actors().pools(), "replica-0", "replica-1")),
            small.before(small.STEPS, "checkpoint", note_and_stop),
            pytest.raises(small.Stopped),
        ):
            train(whole)
        ran.end()
        ran.summary = train(whole)
        yield ran, Broken(*pids, pools)
    finally:
        ran.end()


@pytest.fixture
def fresh_prefect(home: Path) -> None:
    """Throw the Prefect server and its database away; the next flow gets a new one."""
    services.stop(prefect_server.NAME)
    shutil.rmtree(home / "prefect", ignore_errors=True)
