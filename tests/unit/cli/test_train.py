"""``verl-omni train`` where there is nothing to train, and where Prefect's server is lost on the way."""

import http.server
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_omni_core import online
from verl_omni_core.cli import main, train
from verl_omni_core.cluster import services
from verl_omni_core.errors import EngineError
from verl_omni_core.settings.loader import load
from verl_omni_core.stages.finish import STAGE, SUMMARY
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.lease import take_ownership
from verl_omni_core.store.runs import create_run

PROFILE = "glyph-flow_grpo-jpeg-cpu"


def invoke(store: Path, *arguments: str):
    return CliRunner().invoke(main.app, ["train", PROFILE, "--set", f"run.store={store}", "--run-id", "r", *arguments])


def finish(store: Path) -> None:
    config = load(PROFILE, overrides=[f"run.store={store}", "run.id=r"]).config
    run = create_run(store, config.model_dump(mode="json"), code_version="1", run_id="r")
    with take_ownership(run.root, "test") as owned:
        attempt = RunStore(run.root, epoch=owned.epoch).attempt(config.run.steps, STAGE, "key")
        attempt.commit([attempt.write_file(SUMMARY, b"Run: r, 3 steps")], rows=3, parents=[], producer={})


def test_a_finished_run_says_so_and_nothing_is_started_or_written(tmp_path: Path) -> None:
    finish(tmp_path)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    done = invoke(tmp_path)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("Run 'r' is finished and nothing was done") and "Run: r, 3 steps" in done.stdout
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
    assert services.find("ray-head") is None and services.find("prefect-server") is None


@pytest.fixture
def lost_flow(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception, str], None]:
    """Make the flow fail with an error while Prefect is at an address; plain Python then trains at once."""

    def fail(error: Exception, address: str) -> None:
        def run(*_: object, **__: object) -> str:
            raise error

        monkeypatch.setattr(train, "surround", lambda *_, **__: None)
        monkeypatch.setattr(train, "flow", lambda name: run)
        monkeypatch.setattr(online, "train", lambda config, origins: f"trained {config.run.id}")
        monkeypatch.setenv("PREFECT_API_URL", address)

    return fail


@pytest.fixture
def healthy() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/api/health" else 404)
            self.end_headers()

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/api"
    server.shutdown()


def test_a_run_goes_on_without_a_prefect_server_that_is_lost(lost_flow, tmp_path: Path) -> None:
    lost_flow(ConnectionError("refused"), f"http://127.0.0.1:{services.free_port()}/api")
    done = invoke(tmp_path)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "trained r"), done.output
    assert "does not answer any more; the run goes on without it" in done.output


def test_what_fails_while_prefect_answers_fails_the_command(lost_flow, healthy: str, tmp_path: Path) -> None:
    lost_flow(ConnectionError("refused"), healthy)
    assert isinstance(invoke(tmp_path).exception, ConnectionError)


def test_a_runs_own_error_is_not_taken_for_a_lost_server(lost_flow, tmp_path: Path) -> None:
    lost_flow(EngineError("the engine stopped"), f"http://127.0.0.1:{services.free_port()}/api")
    done = invoke(tmp_path)
    assert done.exit_code == 1 and "the engine stopped" in done.stderr


def test_a_run_that_goes_on_without_a_profile_knows_when_its_machines_time_ends(monkeypatch, tmp_path: Path) -> None:
    finish(tmp_path)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "4102444800")
    told = train._of_the_run("r", [f"run.store={tmp_path}", "run.steps=9"]).run
    assert (told.end_by, told.steps) == (datetime(2100, 1, 1, tzinfo=UTC), 9)
    assert train._of_the_run("r", [f"run.store={tmp_path}", "run.end_by=2099-01-01T00:00:00Z"]).run.end_by.year == 2099
