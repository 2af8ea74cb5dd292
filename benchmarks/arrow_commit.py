"""Time to write and commit a step's trajectories: 512 images of 512 x 512 with a window of two, for FlowGRPO.

Prints one JSON line: seconds and bytes of the commit, and seconds of a plain synced write of as many bytes.
"""

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import torch

from verl_omni_core.batches.tables import build_table
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.attempt import Attempt
from verl_omni_core.store.manifest import FileRecord

IMAGES, PACK, WINDOW, LATENT = 512, 32, 2, (16, 64, 64)
PROMPTS, TOKENS, WIDTH, POOLED = 32, 333, 4096, 2048


def trajectories(start: int) -> pa.Table:
    """Return one pack of samples with random latents."""
    rows = range(start, start + PACK)
    return build_table(
        "trajectories",
        {
            "sample_index": list(rows),
            "sample_id": [f"s000001-r{i:06d}-0-g000" for i in rows],
            "uid": [f"s000001-r{i // 16:06d}-0" for i in rows],
            "session": [i % 16 for i in rows],
            "prompt_key": [f"{i // 16:064x}" for i in rows],
            "seed": list(rows),
            "status": ["ok"] * PACK,
            "attempts": [1] * PACK,
            "replica": ["r0"] * PACK,
            "min_version": [0] * PACK,
            "max_version": [0] * PACK,
            "num_turns": [1] * PACK,
            "num_preempted": [-1] * PACK,
            "t_generate_s": [1.0] * PACK,
            "t_tool_s": [0.0] * PACK,
            "t_score_s": [0.0] * PACK,
            "sde_window_start": [0] * PACK,
            "all_latents": torch.randn(PACK, WINDOW + 1, *LATENT),
            "all_timesteps": torch.rand(PACK, WINDOW),
            "step_indices": torch.zeros(PACK, WINDOW, dtype=torch.int64),
            "rollout_log_probs": torch.randn(PACK, WINDOW),
        },
    )


def embeddings() -> pa.Table:
    """Return the prompts' embeddings, once each."""
    return build_table(
        "embeddings",
        {
            "prompt_key": [f"{i:064x}" for i in range(PROMPTS)],
            "encoder_digest": ["0" * 64] * PROMPTS,
            "prompt_embeds": [torch.randn(TOKENS, WIDTH).bfloat16() for _ in range(PROMPTS)],
            "prompt_embeds_len": [TOKENS] * PROMPTS,
            "pooled_prompt_embeds": torch.randn(PROMPTS, POOLED).bfloat16(),
        },
    )


def write_and_commit(store: RunStore, step: int, shards: list[tuple[str, int, pa.Table]]) -> tuple[float, int]:
    """Return seconds and bytes of one commit."""
    start = time.perf_counter()
    attempt = store.attempt(step, "rollout", "key")
    with ThreadPoolExecutor(4) as pool:
        files = list(pool.map(lambda shard: _write(attempt, shard), shards))
    attempt.commit(files, rows=IMAGES, parents=[], producer={})
    return time.perf_counter() - start, sum(file.size_bytes for file in files)


def _write(attempt: Attempt, shard: tuple[str, int, pa.Table]) -> FileRecord:
    return attempt.write_table(*shard)


def plain_write(folder: Path, size_bytes: int) -> float:
    """Return seconds of writing and syncing as many bytes into one file."""
    block = os.urandom(1 << 22)
    start = time.perf_counter()
    with (folder / "plain").open("wb") as file:
        for _ in range(size_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    (folder / "plain").unlink()
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to write; the system's temporary folder by default")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    shards = [("trajectories", i, trajectories(i * PACK)) for i in range(IMAGES // PACK)] + [
        ("embeddings", 0, embeddings())
    ]
    commits, plain, size = [], [], 0
    for step in range(arguments.repeats):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            seconds, size = write_and_commit(RunStore(name), step, shards)
            commits.append(seconds)
            plain.append(plain_write(Path(name), size))
    best, raw = sorted(commits)[len(commits) // 2], sorted(plain)[len(plain) // 2]
    print(
        json.dumps(
            {
                "benchmark": "arrow_commit",
                "images": IMAGES,
                "bytes": size,
                "commit_s": round(best, 3),
                "commit_s_all": [round(s, 3) for s in commits],
                "plain_write_s": round(raw, 3),
                "commit_gb_per_s": round(size / best / 1e9, 2),
                "plain_gb_per_s": round(size / raw / 1e9, 2),
                "ratio": round(best / raw, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
