"""What a rank runs in the tests of several ranks: ``python -m tests.unit.training.programs NAME SIZE FOLDER RANK``."""

import os
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.unit.training import tiny
from verl_omni_core.training import ranks as ranks_module
from verl_omni_core.training import sharding
from verl_omni_core.training.background import SnapshotWriter
from verl_omni_core.training.ranks import Ranks
from verl_omni_core.training.snapshot import state_of

KINDS = {"lora": 4, "full": 0}
"""What trains, and the rank of its adapter."""
ROWS_OF = {1: [list(range(tiny.ROWS))], 2: [list(range(7)), list(range(7, tiny.ROWS))]}


def sgd_steps(
    ranks: Ranks, pipeline: str, rank: int, dtype: str = "float32", steps: int = 3, guided: bool = False
) -> dict[str, Any]:
    """SGD steps on unevenly shared rows: gradients and parameters after each; guided ones with a divergence term.

    Rows go through the network one by one, in float32 that is: what is compared is the ranks' sum, and not how kernels
    round batches of other sizes.
    """
    micro_batch = 1 if dtype == "float32" else 4
    made = tiny.engine(
        pipeline, rank=rank, ranks=ranks, micro_batch=micro_batch, optimizer="sgd", learning_rate=1e-2, dtype=dtype
    )
    tiny.stir(made)
    batch = tiny.take(tiny.batch(pipeline, guided=guided, dtype=getattr(torch, dtype)), ROWS_OF[ranks.size][ranks.rank])
    loss = tiny.policy_gradient()
    if guided:
        made.set_denoising(tiny.denoising(pipeline, 2.0))
        means = made.infer_batch(batch, "reference", means=True)["prev_sample_mean"]
        batch["rows"]["steps"]["ref_prev_sample_mean"] = means
        loss = tiny.policy_gradient(tiny.SimpleNamespace(kl_coef=1.0))
    results: dict[str, Any] = {"gradients": [], "parameters": [], "norms": [], "metrics": [], "deviations": []}
    for _ in range(steps):
        outcome = made.forward_backward_batch(batch, loss)
        results["deviations"].append(outcome.ratio_deviation)
        results["gradients"].append(tiny.gradients(made))
        results["norms"].append(made.optimizer_step().grad_norm)
        results["parameters"].append(tiny.parameters(made))
        results["metrics"].append(outcome.metrics.result())
    return results


def everything(ranks: Ranks, pipeline: str, folder: str, resumes: bool) -> dict[str, Any]:
    """All that needs several ranks, in one start of the processes."""
    results: dict[str, Any] = {
        "lora": sgd_steps(ranks, pipeline, 4),
        "full": sgd_steps(ranks, pipeline, 0),
        "listening": [
            connection.laddr.ip
            for connection in psutil.Process().net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ],
        "bf16": sgd_steps(ranks, pipeline, 0, "bfloat16", 1),
        "guided": sgd_steps(ranks, pipeline, 4, steps=1, guided=True),
    }
    results["empty rank"] = _gradient_with_an_empty_rank(ranks, pipeline)
    results["skip"] = _one_rank_sees_infinity(ranks, pipeline)
    results["adapters"] = _adapters(ranks, pipeline)
    results["checkpoint"] = _checkpoints(ranks, pipeline, Path(folder))
    if resumes:
        results["resumed"] = {kind: resume(ranks, pipeline, f"{folder}/{kind}-1", KINDS[kind])[1] for kind in KINDS}
    return results


def _gradient_with_an_empty_rank(ranks: Ranks, pipeline: str) -> Any:
    made = tiny.engine(pipeline, ranks=ranks, micro_batch=4)
    tiny.stir(made)
    rows = list(range(tiny.ROWS)) if ranks.rank == 0 else []
    outcome = made.forward_backward_batch(tiny.take(tiny.batch(pipeline), rows), tiny.policy_gradient())
    return tiny.gradients(made), outcome.pairs, outcome.metrics.result()


def _one_rank_sees_infinity(ranks: Ranks, pipeline: str) -> Any:
    made = tiny.engine(pipeline, ranks=ranks, learning_rate=0.1)
    batch = tiny.take(tiny.batch(pipeline), ROWS_OF[ranks.size][ranks.rank])
    if ranks.rank == ranks.size - 1:
        batch["rows"]["advantages"][0] = float("inf")
    before = tiny.parameters(made)
    made.forward_backward_batch(batch, tiny.policy_gradient())
    result = made.optimizer_step()
    after = tiny.parameters(made)
    return result.skipped, made.counters.skipped_steps, all(torch.equal(before[n], after[n]) for n in before)


def _adapters(ranks: Ranks, pipeline: str) -> Any:
    made = tiny.engine(pipeline, ranks=ranks, extra_adapters=("old",))
    tiny.stir(made)
    batch = tiny.take(tiny.batch(pipeline), ROWS_OF[ranks.size][ranks.rank])
    scores = {name: made.infer_batch(batch, name)["log_probs"] for name in ("policy", "old", "reference")}
    made.ema_update_adapter("default", "old", 0.25)
    named, _ = made.get_per_tensor_param("old")
    averaged = {name: tensor.clone() for name, tensor in named}
    policy = tiny.parameters(made)
    made.copy_adapter("default", "old")
    copied = {name: tensor.clone() for name, tensor in made.get_per_tensor_param("old")[0]}
    trainable = [n for n, p in made.module.named_parameters() if p.requires_grad]
    return {"scores": scores, "averaged": averaged, "policy": policy, "copied": copied, "trainable": trainable}


def _checkpoints(ranks: Ranks, pipeline: str, folder: Path) -> dict[str, Any]:
    """Snapshots that are written while the next step is made, over a group of their own."""
    results = {}
    for kind, rank in KINDS.items():
        made = tiny.engine(pipeline, rank=rank, ranks=ranks, micro_batch=4, learning_rate=1e-3, ema_decay=0.9)
        tiny.stir(made)
        batch = tiny.take(tiny.batch(pipeline), ROWS_OF[ranks.size][ranks.rank])
        one_step(made, batch)
        writer, place = SnapshotWriter(ranks, 60), folder / f"{kind}-{ranks.size}"
        writer.begin(made, place, {"version": 1})
        results[kind] = one_step(made, batch)
        writer.finish(place, 60)
        writer.close()
    return results


def carry(ranks: Ranks, pipeline: str, source: str, target: str) -> dict[str, Any]:
    """Load the checkpoints of ``source``, return what they hold, and write them again into ``target``."""
    found = {}
    for kind, rank in KINDS.items():
        made = tiny.engine(pipeline, rank=rank, ranks=ranks, micro_batch=4, learning_rate=1e-3, ema_decay=0.9)
        extra = made.load_checkpoint(f"{source}/{kind}-2")
        made.save_checkpoint(f"{target}/{kind}-2", extra)
        found[kind] = {name: sharding.full(tensor) for name, tensor in state_of(made)[0].items()}
    return found


def one_step(made: Any, batch: Any) -> dict[str, Any]:
    outcome = made.forward_backward_batch(batch, tiny.policy_gradient())
    made.optimizer_step()
    made.lr_scheduler_step()
    average = {name: tensor.clone() for name, tensor in made.get_per_tensor_param("average")[0]}
    return {"metrics": outcome.metrics.result(), "parameters": tiny.parameters(made), "ema": average}


def resume(ranks: Ranks, pipeline: str, checkpoint: str, rank: int) -> Any:
    made = tiny.engine(pipeline, rank=rank, ranks=ranks, micro_batch=4, learning_rate=1e-3, ema_decay=0.9)
    extra = made.load_checkpoint(checkpoint)
    batch = tiny.take(tiny.batch(pipeline), ROWS_OF[ranks.size][ranks.rank])
    return extra, one_step(made, batch)


def main() -> None:
    name, size, folder, rank = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    address = folder / "port"
    store = None
    if rank == 0:
        store, port = ranks_module.open_rendezvous("127.0.0.1", 60)
        (folder / "port.part").write_text(str(port))
        (folder / "port.part").rename(address)
    ranks = ranks_module.join(
        rank, size, host="127.0.0.1", port=_await(address), device="cpu", timeout_s=60, store=store
    )
    arguments = torch.load(folder / "arguments.pt", weights_only=False)
    torch.save(globals()[name](ranks, **arguments), folder / f"result-{rank}.pt")
    ranks.barrier()
    ranks_module.leave()
    # gloo's threads may outlive the interpreter's own end and then abort the process; the result is on disk
    os._exit(0)


def _await(path: Path) -> int:
    import time

    deadline = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("rank 0 opened no rendezvous")
        time.sleep(0.05)
    return int(path.read_text())


if __name__ == "__main__":
    main()
