"""Memory of the driver over many steps whose samples are empty: one JSON line with its spread.

    python -m benchmarks.noop_steps --steps 1000

Plan, advantage and log are the product's tasks, in a flow against a standing Prefect server of our own; rollout,
reward, update and sync commit tables of four samples and append to the ledger, as a process without actors can. Store,
index, retention and ledger are the product's.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PROMPTS, GROUP = 2, 2
SAMPLES = PROMPTS * GROUP
_WARM_UP_SHARE = 0.1
"""Of the steps: caches fill and libraries load in them."""


def make_session(folder: Path, steps: int) -> Any:
    """Make a run and own it, with stand-ins for its actors."""
    from verl_omni_core.settings.run import RunConfig
    from verl_omni_core.stages.session import RunRef, Session, register
    from verl_omni_core.store.artifacts import RunStore
    from verl_omni_core.store.lease import take_ownership
    from verl_omni_core.store.runs import create_run

    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": f"sign {i}", "ground_truth": str(i)} for i in range(64)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig.model_validate(
        {
            "run": {"store": str(folder / "runs"), "steps": steps, "checkpoint_every": 10},
            "data": {"train": str(prompts), "validation": str(prompts), "prompts_per_step": PROMPTS},
            "rollout": {"group_size": GROUP},
            "durability": {"retention": {"trajectory_steps": 5, "weight_steps": 5}},
        }
    )
    root = create_run(config.run.store, config.model_dump(mode="json"), code_version="1", run_id="noop").root
    ownership = take_ownership(root, "benchmark")
    actors: Any = SimpleNamespace(gpus=lambda: 0)
    store = RunStore(root, epoch=ownership.epoch)
    return register(Session(RunRef(str(root), ownership.epoch), config, store, actors, ownership))


def commit(session: Any, step: int, stage: str, parents: list[Any], tables: dict[str, Any], **facts: Any) -> Any:
    """Commit tables as a stage."""
    attempt = session.store.attempt(step, stage, f"key-{step}", parents=parents)
    files = [attempt.write_table(name, 0, table) for name, table in tables.items()]
    return attempt.commit(files, rows=SAMPLES, parents=parents, producer=session.producer(**facts))


def empty_samples(session: Any, step: int, planned: Any) -> list[Any]:
    """Commit what rollout and reward of a step leave, without latents and pictures."""
    import pyarrow as pa

    from verl_omni_core.rewards._contract import Score
    from verl_omni_core.rewards._tables import summary_table
    from verl_omni_core.stages.metric_table import metric_table

    requests = session.store.table(planned, "requests")
    identity = requests.select(["sample_index", "sample_id", "uid", "session"])
    drawn = commit(
        session,
        step,
        "rollout",
        [planned],
        {"trajectories": identity, "metrics": metric_table(step, {"agent_loop/generate/mean": 0.5})},
        weights_version=step - 1,
    )
    scores = [{"ocr": Score(float((step + row) % 3))} for row in range(SAMPLES)]
    summary = summary_table(pa.table(identity), scores, session.config.reward)
    return [drawn, commit(session, step, "reward", [drawn], {"reward_summary": summary})]


def learn(session: Any, step: int, parents: list[Any]) -> Any:
    """Commit what update, checkpoint and sync of a step leave, and append to the ledger."""
    import numpy as np
    import pyarrow as pa

    from verl_omni_core.stages.metric_table import metric_table

    session.ledger.append(
        {
            "update_id": f"{step:06d}/0000",
            "step": step,
            "kind": "optimizer",
            "version_before": step - 1,
            "version_after": step,
            "batch_digest": f"{step:064x}",
            "weights_digest": None,
            "skipped": False,
            "metrics_json": json.dumps({"actor/loss": 0.25}),
        }
    )
    done = commit(session, step, "update", parents, {"metrics": metric_table(step, {"actor/loss": 0.25})})
    state = pa.table({"x": np.zeros(1000)})
    for stage in ("checkpoint", "sync") if step % 10 == 0 else ("sync",):
        commit(session, step, stage, [done], {"state": state})
    return done


def run_steps(session: Any, steps: int) -> dict[str, list[float]]:
    """Run the steps as Prefect tasks; return the driver's memory, in bytes, and seconds of each step."""
    from prefect import flow, task

    from tasks.evaluation import log_step
    from tasks.rollout import plan_step
    from tasks.settings import STAGE
    from tasks.update import estimate_advantages

    drawn = task(name="rollout", **STAGE)(lambda step, planned: empty_samples(session, step, planned))
    trained = task(name="update", **STAGE)(lambda step, parents: learn(session, step, parents))
    seen: dict[str, list[float]] = {"bytes": [], "seconds": []}

    @flow(name="noop-steps", log_prints=False)
    def noop_steps() -> None:
        run = session.ref
        for step in range(1, steps + 1):
            begun = time.perf_counter()
            planned = plan_step(run, step)
            samples, rewards = drawn(step, planned)
            advantages = estimate_advantages(run, step, rewards)
            updated = trained(step, [samples, advantages])
            log_step(run, step, [samples, rewards, advantages, updated])
            seen["seconds"].append(time.perf_counter() - begun)
            seen["bytes"].append(private_bytes())

    noop_steps()
    return seen


def private_bytes() -> float:
    """Return this process's own memory: pages that it shares with others or that map files do not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith("RssAnon"))


def report(seen: dict[str, list[float]]) -> dict[str, Any]:
    """Return the line: how far apart the smallest and the largest size after the warm-up are."""
    from statistics import median

    sizes = seen["bytes"]
    settled = sizes[int(len(sizes) * _WARM_UP_SHARE) :]
    return {
        "benchmark": "noop_steps",
        "steps": len(sizes),
        "spread_bytes": int(max(settled) - min(settled)),
        "bytes_after_warm_up": int(settled[0]),
        "step_s": round(median(seen["seconds"]), 4),
        "bytes_every_tenth": [int(size) for size in sizes[:: max(len(sizes) // 10, 1)]],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="Where to write; the system's temporary folder by default.")
    arguments = parser.parse_args()
    line = os.dup(1)
    os.dup2(2, 1)  # libraries print; the line stands alone
    with tempfile.TemporaryDirectory(prefix="noop-", dir=arguments.folder, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.environ["VERL_OMNI_HOME"] = str(folder / "home")
        os.environ["PREFECT_LOGGING_LEVEL"] = "WARNING"
        os.environ.pop("PREFECT_API_URL", None)
        from verl_omni_core.cluster import prefect_server, services
        from verl_omni_core.stages.session import let_go

        print("starting a Prefect server", file=sys.stderr)
        try:
            os.environ.update(prefect_server.environment())
            os.environ["PREFECT_API_URL"] = prefect_server.wait(prefect_server.launch())
            session = make_session(folder, arguments.steps)
            try:
                fields = report(run_steps(session, arguments.steps))
            finally:
                let_go(session.ref.root)
        finally:
            services.stop(prefect_server.NAME)
    os.write(line, (json.dumps(fields) + "\n").encode())


if __name__ == "__main__":
    main()
