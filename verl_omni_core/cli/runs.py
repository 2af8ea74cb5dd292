"""``verl-omni runs``: the runs of a store."""

from verl_omni_core.cli._arguments import Store

_COLUMNS = ("run", "kind", "status", "steps", "reward", "started (UTC)", "updated (UTC)", "forked from")


def runs(store: Store = "runs") -> None:
    """List the runs of a store, oldest first, whether or not their flows are alive."""
    from verl_omni_core.store.runs import EVALUATE, list_runs

    found = list_runs(store)
    if not found:
        print(f"{store} has no runs; start one with: verl-omni train PROFILE")
        return
    rows = [_COLUMNS]
    for run in found:
        steps = f"{run.steps_done}/{'?' if run.steps is None else run.steps}"
        rows.append(
            (
                run.run_id,
                run.kind,
                run.status,
                "-" if run.kind == EVALUATE else steps,
                "-" if run.reward is None else f"{run.reward:.4f}",
                _time(run.started),
                _time(run.updated),
                run.lineage or "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip())


def _time(text: str) -> str:
    return text.replace("T", " ").removesuffix("+00:00")
