"""The folder of a run with many steps, as the product would have left it, made in seconds rather than days.

Manifests, commits, ledger records and index are the store's own, and ``verl-omni verify`` finds nothing wrong with
them. Two things are cheaper than in a real run: nothing waits for the disk, so a power cut may lose it, and the tables
of all steps are hard links to those of one step.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa

from verl_omni_core.identity import digest
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store import durable_files, index
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.attempt import COMMIT, DESCRIPTION, MANIFEST, stage_folder
from verl_omni_core.store.lease import take_ownership
from verl_omni_core.store.ledger import Ledger
from verl_omni_core.store.manifest import ArtifactRef, FileRecord, Manifest, sha256
from verl_omni_core.store.runs import create_run

TABLES = {
    "plan": ("prompts", "requests"),
    "rollout": ("trajectories", "embeddings", "media", "metrics"),
    "reward": ("rewards", "reward_summary"),
    "old_log_probs": ("logprobs",),
    "reference": ("reference",),
    "advantage": ("advantages", "metrics"),
    "update": ("metrics",),
    "checkpoint": ("state",),
    "sync": ("weights",),
    "probe": (),
    "log": ("metrics",),
}
"""Stages of a step, in order, with their tables: eleven, as with a snapshot and a probe at every step."""
PARENTS = {
    "rollout": ("plan",),
    "reward": ("plan", "rollout"),
    "old_log_probs": ("rollout",),
    "reference": ("rollout",),
    "advantage": ("reward",),
    "update": ("rollout", "advantage", "old_log_probs", "reference"),
    "checkpoint": ("update",),
    "sync": ("update",),
    "probe": ("sync",),
    "log": ("rollout", "reward", "advantage", "update"),
}
ROWS = 8


@dataclass(frozen=True)
class _Template:
    """A file that all steps share."""

    path: Path
    record: FileRecord


def make_long_run(store: Path, steps: int, *, run_id: str = "long") -> Path:
    """Make a run of finished steps without an owner; return its folder."""
    config = RunConfig.model_validate({"run": {"steps": steps, "checkpoint_every": 1}})
    root = create_run(store, config.model_dump(mode="json"), code_version="1", run_id=run_id).root
    with unsynced(), take_ownership(root, "benchmark") as own:
        artifacts, ledger = RunStore(root, epoch=own.epoch), Ledger(root, epoch=own.epoch)
        made: dict[str, ArtifactRef] = {}
        templates = _templates(artifacts)
        for step in range(1, steps + 1):
            for stage in TABLES:
                # a rollout also descends from the weights of the step before
                names = (*PARENTS.get(stage, ()), *(("sync",) if stage == "rollout" and step > 1 else ()))
                parents = tuple(made[name] for name in names)
                made[stage] = _commit(root, step, stage, parents, templates[stage])
            ledger.append(_record(step, made["update"]))
            index.extend(artifacts, ledger, step)
    return root


@contextmanager
def unsynced() -> Iterator[None]:
    """Let the store write without waiting for the disk."""
    with mock.patch.object(durable_files, "_sync"):
        yield


def _templates(store: RunStore) -> dict[str, list[_Template]]:
    table = pa.table({"sample_index": np.arange(ROWS), "x": np.arange(ROWS) * 0.5})
    attempt = store.attempt(0, "sync", "templates")
    attempt.commit([], rows=0, parents=[], producer={})  # step 0 has what training began with
    return {
        stage: [
            _Template(attempt.folder / record.name, record)
            for record in (attempt.write_table(name, 0, table) for name in names)
        ]
        for stage, names in TABLES.items()
    }


def _commit(
    root: Path, step: int, stage: str, parents: tuple[ArtifactRef, ...], templates: list[_Template]
) -> ArtifactRef:
    key = digest([stage, step, [parent.manifest_sha256 for parent in parents]])
    name = f"000001-{key[:8]}"
    manifest = Manifest(
        run_id=root.name,
        step=step,
        stage=stage,
        stage_key=key,
        attempt_id=name,
        fence_epoch=1,
        files=tuple(template.record for template in templates),
        parents=parents,
        row_count=ROWS,
        producer={"code_version": "1", "weights_version": step, "finished": "2026-01-01T00:00:00.000+00:00"},
    )
    data = manifest.to_bytes()
    ref = ArtifactRef(stage, step, key, sha256(data), name, ROWS)
    stage_at = stage_folder(root, step, stage)
    attempt = stage_at / "attempts" / name
    attempt.mkdir(parents=True)
    for template in templates:
        os.link(template.path, attempt / template.record.name)
    (attempt / DESCRIPTION).write_text(json.dumps({"key": key, "fence_epoch": 1, "started": ""}))
    (attempt / MANIFEST).write_bytes(data)
    (stage_at / COMMIT).write_text(json.dumps({**ref.to_json(), "fence_epoch": 1}))
    return ref


def _record(step: int, update: ArtifactRef) -> dict[str, object]:
    return {
        "update_id": f"{step:06d}/0000",
        "step": step,
        "kind": "optimizer",
        "version_before": step - 1,
        "version_after": step,
        "batch_digest": update.key,
        "weights_digest": None,
        "skipped": False,
        "metrics_json": "{}",
    }
