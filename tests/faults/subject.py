"""A run that meets faults: its flow in subprocesses, started as often as it takes, and what they noted on their way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.injected import planned
from tests.faults.injected.planned import Fault
from tests.faults.size import GROUP, PACK, PROMPTS, STEPS
from tests.flows.recorded import Recorded
from tests.project.collected import ROOT
from verl_omni_core.batches.schema import metadata_of
from verl_omni_core.settings.loader import load
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store.runs import RunFolder, open_run
from verl_omni_core.workers.namespaces import end_actors

PROFILE = "glyph-flow_grpo-jpeg-cpu"
DRAWING = ("rollout", "validate-samples", "preview")
"""Stages that draw samples, pack by pack."""
LIMIT_S = 180.0
"""Longest that one process of a flow may take."""
POLL_S = 0.05

_SMALL: dict[str, object] = {
    "run.steps": STEPS,
    # the second step, in which most faults strike, has every stage there is
    "run.validate_before": "false",
    "run.validate_every": 2,
    "run.checkpoint_every": 2,
    "run.images_every": 2,
    "data.prompts_per_step": PROMPTS,
    "data.max_validation_prompts": 2,
    "rollout.group_size": GROUP,
    "rollout.pack_size": PACK,
    "rollout.max_batch": PACK,
    "rollout.threads": 1,
    "reward.scorers": '[{name = "tests.faults.scorer"}]',
    "reward.timeout_s": 15,
    "algorithm.kl_coef": 0.01,
    "algorithm.recompute_old_log_probs": "true",
    "algorithm.max_ratio_deviation": 1e-5,
    "training.ranks": 2,
    "training.prompts_per_update": 1,
    "training.micro_batch": 4,
    "training.threads": 1,
    "training.ema_decay": 0.9,
    "tracking.grid_prompts": 2,
    "tracking.tensorboard": "false",
    "durability.min_free_gb": 0.001,
    "durability.no_progress_budget": 9,  # a run that takes many faults in one stage is meant to
    "durability.retention.checkpoints": "none",  # every file is checked at the end
    # deadlines that a stall of a loaded machine passes and a test does not wait for
    "training.step_timeout_s": 120,
    "cluster.actor_timeout_s": 150,
    "cluster.keep_actors": "true",
}


def settings(run_id: str, store: Path, **changes: object) -> RunConfig:
    """Return the settings of the suite's run; ``__`` in a name stands for its dot."""
    values = _SMALL | {"run.id": run_id, "run.store": store}
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return load(PROFILE, overrides=[f"{name}={value}" for name, value in values.items()]).config


@dataclass
class Started:
    """One process of the flow."""

    process: subprocess.Popen[bytes]
    began: float
    """Unix time just before it was started."""
    events_file: Path
    log: Path

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        """Wait for its end and return its exit code; ends it, and fails, where that takes too long."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)
            raise AssertionError(f"the flow did not end within {timeout_s:.0f} s:\n{self.output()}") from None

    def output(self) -> str:
        """Return the end of what it printed."""
        return self.log.read_text(errors="replace")[-6000:]

    def events(self) -> list[dict[str, Any]]:
        """Return what it noted, in order."""
        lines = self.events_file.read_text().splitlines() if self.events_file.exists() else []
        return [json.loads(line) for line in lines]


@dataclass
class Subject:
    """A run and all processes that its flow had."""

    config: RunConfig
    plan: Path
    folder: Path
    """For what the processes note and print."""
    environment: dict[str, str]
    starts: list[Started] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return Path(self.config.run.store) / str(self.config.run.id)

    @property
    def recorded(self) -> Recorded:
        return Recorded(self.root)

    def folder_of_run(self) -> RunFolder:
        """Return the run's folder, as listings read it."""
        return open_run(self.root.parent, self.root.name)

    def start(self, *faults: Fault, **options: Any) -> Started:
        """Start the flow in a process of its own, with these faults ahead of it; options as :meth:`start_beside`."""
        planned.write(self.plan, faults)
        return self.start_beside(**options)

    def start_beside(self, *, retries: int = 0, twice: bool = False, resume: int | str = "auto") -> Started:
        """Start the flow in a process of its own; the plan stays as it is.

        Args:
            retries: of the flow run, by Prefect, in the same process.
            twice: whether every stage is delivered twice.
            resume: the setting ``run.resume``.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        number = len(self.starts)
        config = self.folder / f"{number}.json"
        run = self.config.run.model_copy(update={"resume": resume})
        config.write_text(self.config.model_copy(update={"run": run}).model_dump_json())
        events, log = self.folder / f"{number}.events", self.folder / f"{number}.log"
        command = [sys.executable, "-m", "tests.faults.driver", str(config), str(events), *(["--twice"] * twice)]
        environment = {**self.environment, "PREFECT_FLOWS_DEFAULT_RETRIES": str(retries)}
        began = time.time()
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
        self.starts.append(Started(process, began, events, log))
        return self.starts[-1]

    def finish(self, *faults: Fault, **options: Any) -> Started:
        """Start the flow and see it end well."""
        started = self.start(*faults, **options)
        assert started.wait() == 0, started.output()
        return started

    def killed_at(self, *faults: Fault, **options: Any) -> float:
        """Start the flow, see it die of the first fault, and return when that struck."""
        started = self.start(*faults, **options)
        assert started.wait() == -signal.SIGKILL, f"{faults}: {started.output()}"
        return self.struck(0)

    def struck(self, number: int) -> float:
        """Return when a fault of the present plan struck."""
        at = planned.struck(self.plan, number)
        assert at is not None, f"fault {number} did not strike:\n{self.starts[-1].output()}"
        return at

    def wait_for(self, is_so: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
        """Wait for something to happen while the flow's process lives."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert self.starts[-1].process.poll() is None, self.starts[-1].output()
            assert time.monotonic() < deadline, self.starts[-1].output()
            time.sleep(POLL_S)

    def end(self) -> None:
        """End what still runs of the flow's processes and of the run's actors."""
        for started in self.starts:
            if started.process.poll() is None:
                started.process.kill()
                started.process.wait(30)
        end_actors(self.config.cluster, self.root)

    def seconds_to_next_command(self, struck: float) -> float:
        """Return how long after a fault the run began new work: an attempt at a stage that was not done.

        Counted from the start of the process that began it, where that started after the fault, else from the fault.
        """
        started, event = self._next_attempt(struck)
        return float(event["time"] - max(started.began, struck))

    def next_stage(self, struck: float) -> str:
        """Return the stage at which the run went on after a fault."""
        return str(self._next_attempt(struck)[1]["stage"])

    def _next_attempt(self, struck: float) -> tuple[Started, dict[str, Any]]:
        for started in self.starts:
            for event in started.events():
                if event["what"] == "attempt" and event["time"] > struck:
                    return started, event
        raise AssertionError("nothing was begun after the fault")

    def packs_drawn_again(self, struck: float) -> int:
        """Return how many packs the first attempt after a fault drew at the stage that the fault broke off.

        Each committed shard says which attempt drew it. None for a stage of which the fault left nothing to do.
        """
        events = sorted((e for s in self.starts for e in s.events()), key=lambda event: event["time"])
        drawn = 0
        for step, stage in {(e["step"], e["stage"]) for e in events if e["stage"] in DRAWING}:
            own = [e for e in events if (e["step"], e["stage"]) == (step, stage)]
            before = [event["what"] for event in own if event["time"] <= struck]
            after = [event["attempt"] for event in own if event["what"] == "attempt" and event["time"] > struck]
            if "attempt" in before and "commit" not in before and after:
                drawn += self.drawn_by(step, stage).count(after[0])
        return drawn

    def drawn_by(self, step: int, stage: str) -> list[str]:
        """Return the attempt that drew each pack of a committed stage, in order."""
        shards = self.recorded.store.tables(self.recorded.ref(step, stage), "media")
        return [metadata_of(shard.schema).attempt_id for shard in shards]

    def shard_files(self, step: int, stage: str, name: str) -> list[Path]:
        """Return the files of that name in all attempts at a stage; of several names of one file one."""
        found = (self.root / "steps" / f"{step:06d}" / stage / "attempts").glob(f"*/{name}")
        return list({path.stat().st_ino: path for path in sorted(found)}.values())


def flip_bit(path: Path) -> None:
    """Change one bit in the middle of a file, as a disk that goes bad."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    _rewrite(path, bytes(data))


def truncate(path: Path) -> None:
    """Cut a file in half, as a crash of the file system."""
    _rewrite(path, path.read_bytes()[: path.stat().st_size // 2])


def _rewrite(path: Path, data: bytes) -> None:
    # in place: the file keeps its inode, and with it every name that it has
    path.chmod(0o644)
    path.write_bytes(data)


def environment(home: Path, plan: Path, others: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """Return the environment of the flow's processes: the services in ``home``, and the plan."""
    return {**os.environ, "VERL_OMNI_HOME": str(home), planned.VARIABLE: str(plan), **dict(others)}
