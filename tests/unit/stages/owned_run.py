"""A run that this process owns, with tables committed by hand: no flow, no actor, no engine."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from verl_omni_core.batches.tables import build_table
from verl_omni_core.rewards._contract import Score
from verl_omni_core.rewards._tables import score_table, summary_table
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.metric_table import metric_table
from verl_omni_core.stages.plan import plan
from verl_omni_core.stages.session import RunRef, Session, register
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.lease import take_ownership
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.store.runs import create_run

SAMPLES, GPUS = 4, 2
TIMESTEPS = (900.0, 800.0)
DRAWN_LOG_PROBS = torch.full((SAMPLES, 2), -1.0)


class Sent:
    """A tracker that keeps what it is sent."""

    def __init__(self) -> None:
        self.scalars_of: list[tuple[int, dict[str, float]]] = []

    def scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        self.scalars_of.append((step, dict(metrics)))

    def image(self, step: int, name: str, data: bytes) -> None:
        raise AssertionError("no picture is expected here")

    def gone_back(self, step: int) -> None:
        self.scalars_of = [sent for sent in self.scalars_of if sent[0] <= step]

    def close(self) -> None:
        return None


def settings(folder: Path) -> RunConfig:
    """Two prompts without a data source, two samples of each."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"sign {i}", "ground_truth": str(i)}) + "\n" for i in range(2)))
    return RunConfig.model_validate(
        {
            "run": {"store": str(folder / "runs")},
            "data": {"train": str(prompts), "validation": str(prompts), "prompts_per_step": 2},
            "sampler": {"validation": {"samples_per_prompt": 2}},
            "rollout": {"group_size": 2},
        }
    )


def make(folder: Path) -> RunConfig:
    """Make the run's folder; return its settings."""
    config = settings(folder)
    create_run(config.run.store, config.model_dump(mode="json"), code_version="1", run_id="owned")
    return config


def take(config: RunConfig) -> Session:
    """Become the run's next owner."""
    root = Path(config.run.store) / "owned"
    ownership = take_ownership(root, "me")
    actors: Any = SimpleNamespace(scorer_versions=lambda: {"ocr": "1"}, gpus=lambda: GPUS)
    store = RunStore(root, epoch=ownership.epoch)
    session = Session(RunRef(str(root), ownership.epoch), config, store, actors, ownership)
    session.tracker = Sent()  # type: ignore[misc]
    return register(session)


def leave(session: Session) -> None:
    """End as a process does."""
    assert session.ownership is not None
    session.ownership.release()


def commit_rollout(session: Session, step: int, *, version: int) -> list[ArtifactRef]:
    """Commit a step's plan and its samples."""
    planned = plan(session.ref, step)
    count = [0] * SAMPLES
    trajectories = {
        **_identity(),
        "prompt_key": ["p"] * SAMPLES,
        "seed": list(range(SAMPLES)),
        "status": ["ok"] * SAMPLES,
        "attempts": count,
        "replica": ["replica-0"] * SAMPLES,
        "min_version": [version] * SAMPLES,
        "max_version": [version] * SAMPLES,
        "num_turns": count,
        "num_preempted": count,
        **{name: [0.0] * SAMPLES for name in ("t_generate_s", "t_tool_s", "t_score_s")},
        "all_timesteps": torch.tensor([TIMESTEPS] * SAMPLES),
        "rollout_log_probs": DRAWN_LOG_PROBS,
    }
    attempt = session.store.attempt(step, "rollout", "key", weights_version=version)
    files = [
        attempt.write_table("trajectories", 0, build_table("trajectories", trajectories)),
        attempt.write_table("metrics", 0, metric_table(step, {"agent_loop/compute_score/mean": 0.5})),
    ]
    return [planned, attempt.commit(files, rows=SAMPLES, parents=[planned], producer={})]


def commit_rest(session: Session, step: int, rewards: list[float | None]) -> list[ArtifactRef]:
    """Commit a step's rewards, advantages and update."""
    scored = [{"ocr": Score(reward, None if reward is not None else "unreadable")} for reward in rewards]
    summary = summary_table(build_table("media", media()), scored, session.config.reward)
    reward = session.store.attempt(step, "reward", "key")
    refs = [reward.commit([reward.write_table("reward_summary", 0, summary)], rows=SAMPLES, parents=[], producer={})]
    for stage, metrics in (("advantage", {"critic/rewards/mean": 0.5}), ("update", {"actor/loss": 0.25})):
        attempt = session.store.attempt(step, stage, "key")
        files = [attempt.write_table("metrics", 0, metric_table(step, metrics))]
        refs.append(attempt.commit(files, rows=1, parents=[], producer={}))
    return refs


def commit_log_probs(session: Session, step: int, values: torch.Tensor) -> None:
    """Commit recomputed log-probs [SAMPLES, 2]."""
    table = build_table("logprobs", {**_identity(), "weights_version": [step - 1] * SAMPLES, "old_log_probs": values})
    attempt = session.store.attempt(step, "old_log_probs", "key")
    attempt.commit([attempt.write_table("logprobs", 0, table)], rows=SAMPLES, parents=[], producer={})


def commit_held_out(session: Session, step: int, scores: list[Score]) -> ArtifactRef:
    """Commit held-out samples that were scored as they came."""
    ids = _identity()
    scored = [{"ocr": score} for score in scores]
    table = score_table("scores", ids["sample_index"], ids["sample_id"], scored, session.config.reward, {"ocr": "1"})
    attempt = session.store.attempt(step, "validate-samples", "key")
    files = [
        attempt.write_table("media", 0, build_table("media", media())),
        attempt.write_table("scores", 0, table),
    ]
    return attempt.commit(files, rows=SAMPLES, parents=[], producer={})


def media() -> dict[str, Any]:
    """The ``media`` table's columns: black pictures of 8 by 8."""
    pixels = torch.zeros(SAMPLES, 3, 8, 8, dtype=torch.uint8)
    return {**_identity(), "kind": ["image"] * SAMPLES, "pixels": pixels, "sha256": [bytes(32)] * SAMPLES}


def _identity() -> dict[str, Any]:
    return {
        "sample_index": list(range(SAMPLES)),
        "sample_id": [f"s{i}" for i in range(SAMPLES)],
        "uid": [f"u{i // 2}" for i in range(SAMPLES)],
        "session": [i % 2 for i in range(SAMPLES)],
    }
