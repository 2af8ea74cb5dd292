"""Every fault of the suite, by name, in the order of the page."""

STAGES = (
    *("plan", "rollout", "reward", "old_log_probs", "reference", "advantage", "checkpoint", "update", "sync"),
    *("sync-average", "validate-samples", "validate", "preview", "log"),
)
"""What a step with everything in it commits, in order; the checkpoint is that of the step before."""

FLOW: dict[str, str] = {
    **{f"flow-inside-{stage}": f"the flow, inside `{stage}`: all is written, nothing committed" for stage in STAGES},
    **{f"flow-after-{stage}": f"the flow, after the commit of `{stage}`" for stage in STAGES},
    "flow-update-sent": "the flow, while the ranks compute its update",
    "flow-update-answered": "the flow, after the ranks have made the update; the answer is lost",
}
MID_ROLLOUT, HALF_LEDGER, HALF_SYNC = "flow-mid-rollout", "flow-half-ledger", "flow-half-sync"
RANKS: dict[str, str] = {
    "rank-before-vote": "a trainer rank, before the ranks vote",
    "rank-before-step": "a trainer rank, between vote and optimizer step",
    "rank-after-step": "a trainer rank, after the optimizer step and before the ledger record",
}
POOLS: dict[str, str] = {
    "replica-killed": "a replica, in the middle of a batch",
    "rollout-worker-killed": "a rollout worker, in the middle of a rollout",
    "reward-worker-killed": "a reward worker, while it scores",
    "replica-killed-in-sync": "a replica, as it loads new weights",
}
SCORERS: dict[str, str] = {
    "scorer-hangs": "hangs, past `reward.timeout_s`",
    "scorer-raises": "raises",
    "scorer-nan": "returns NaN",
    "scorer-text": "returns a score that is text",
}
DAMAGE: dict[str, str] = {
    "finished-shard-flipped": "a bit flips in a finished shard of a rollout that is not committed",
    "finished-shard-cut": "such a shard is cut in half",
    "committed-shard-flipped": "a bit flips in a committed shard that the next stage reads",
    "committed-shard-cut": "such a shard is cut in half",
    "checkpoint-flipped": "a bit flips in the newest checkpoint, and no trainer lives",
    "checkpoint-cut": "the newest checkpoint is cut in half, and no trainer lives",
}
SURROUNDINGS: dict[str, str] = {
    "disk-full": "the disk is full in the middle of a step",
    "prefect-gone": "the Prefect server is gone for a minute",
    "prefect-deleted": "the Prefect database is deleted between two attempts, the flow killed",
    "stages-twice": "every stage is delivered twice",
    "second-flow": "a second flow is started on the run",
    "sigterm": "SIGTERM to the flow, in mid-rollout",
}

GROUPS: dict[str, dict[str, str]] = {
    "SIGKILL of the flow process": {
        MID_ROLLOUT: "the flow, in mid-rollout: two of four packs finished, two not begun",
        **FLOW,
        HALF_LEDGER: "the flow, between the ledger records of an update's two optimizer steps",
        HALF_SYNC: "the flow, when one of two replicas has loaded the new weights",
    },
    "SIGKILL of an actor": {**RANKS, **POOLS},
    "A scorer": SCORERS,
    "Damaged files": DAMAGE,
    "Around the run": SURROUNDINGS,
}
"""Heading of a table to its cases."""


def all_cases() -> list[str]:
    """Return the names of all cases in the order of the page."""
    return [case for cases in GROUPS.values() for case in cases]
