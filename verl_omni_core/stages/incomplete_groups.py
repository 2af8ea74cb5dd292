"""Groups of a step that lack samples or scores: who of the others still counts, and why not.

What is left out keeps its rows, with status and reason; it enters no statistic and no gradient.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import pyarrow as pa

from verl_omni_core.batches import columns
from verl_omni_core.batches.tables import build_table
from verl_omni_core.errors import NumericError

POLICY = "incomplete_groups"
"""In the manifest of a rollout that lacks samples: the ``rollout.failure`` that let it be committed."""
OK, UNSCORED, DROPPED = "ok", "unscored", "dropped"


def lost_by_group(failed: pa.Table | None, drawn: Sequence[int]) -> dict[str, list[str]]:
    """Return the error of each sample that was not drawn, by group.

    Args:
        failed: ``trajectories_failed``, which also tells why seeds were replaced; none if there is none.
        drawn: indices of the samples that there are.
    """
    found: dict[str, list[str]] = {}
    there = set(drawn)
    for row in () if failed is None else failed.to_pylist():
        if row[columns.SAMPLE_INDEX] not in there:
            error = f"{row[columns.SAMPLE_ID]}: {row[columns.ERROR_CLASS]}: {row[columns.ERROR_MESSAGE]}"
            found.setdefault(row[columns.UID], []).append(error)
    return found


def reasons(
    uids: Sequence[str],
    scored: Sequence[bool],
    lost: Mapping[str, Sequence[str]],
    *,
    rollout: str | None,
    reward: str,
    least: int,
) -> dict[str, str]:
    """Return why whole groups are left out, by group; groups that count are not in it.

    Args:
        uids, scored: group of each of the N samples that were drawn, and whether it has a score.
        lost: errors of the samples that were not drawn, by group.
        rollout: the policy for groups that lack samples: ``drop``, or ``zero_weight``, which keeps the others if
            enough of them have a score.
        reward: ``drop`` leaves a group out if one of its samples has no score.
        least: samples with a score that advantages need in a group.
    """
    drawn = Counter(uids)
    with_score = Counter(uid for uid, has in zip(uids, scored, strict=True) if has)
    found = {}
    for uid, count in drawn.items():
        missing, unscored = len(lost.get(uid, ())), count - with_score[uid]
        if missing and rollout == "drop":
            found[uid] = f"{missing} of {count + missing} samples of the group could not be drawn; {lost[uid][0]}"
        elif missing and with_score[uid] < least:
            found[uid] = (
                f"{missing} of {count + missing} samples of the group could not be drawn and {with_score[uid]} of the "
                f"others have a score, advantages need {least}; {lost[uid][0]}"
            )
        elif unscored and reward == "drop":
            found[uid] = f"{unscored} of {count + missing} samples of the group have no score"
    return found


def with_status(summary: pa.Table, left_out: Mapping[str, str]) -> pa.Table:
    """Return a ``reward_summary`` whose groups in ``left_out`` are not valid, each row with its status and reason.

    Raises:
        NumericError: no sample is left.
    """
    uids, scored = summary[columns.UID].to_pylist(), summary[columns.VALID].to_pylist()
    valid = [has and uid not in left_out for uid, has in zip(uids, scored, strict=True)]
    if not any(valid):
        why = next(iter(left_out.values()), "no sample has a score")
        raise NumericError(
            f"none of the {len(valid)} samples of the step can be trained on; the first reason: {why}. Remove the "
            "cause and start the run again"
        )
    status = [DROPPED if uid in left_out else (OK if has else UNSCORED) for uid, has in zip(uids, scored, strict=True)]
    table = {name: summary[name] for name in summary.column_names}
    table |= {columns.VALID: valid, columns.STATUS: status, columns.REASON: [left_out.get(uid) for uid in uids]}
    return build_table("reward_summary", table)


def failure_metrics(summary: pa.Table, lost: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return ``training/rollout_failure/evicted_*`` of a step.

    Args:
        summary: with status, of the samples that were drawn.
        lost: errors of those that were not, by group.
    """
    dropped = [uid for uid, status in zip(*_columns(summary), strict=True) if status == DROPPED]
    undrawn = set(lost) - set(summary[columns.UID].to_pylist())
    return {
        "training/rollout_failure/evicted_groups": len({*dropped, *undrawn}),
        "training/rollout_failure/evicted_trajectories": len(dropped) + sum(map(len, lost.values())),
    }


def dropped(summary: pa.Table) -> list[bool]:
    """Return for each sample whether it was left out with its group."""
    if columns.STATUS not in summary.column_names:
        return [False] * summary.num_rows
    return [status == DROPPED for status in summary[columns.STATUS].to_pylist()]


def _columns(summary: pa.Table) -> tuple[list[str], list[str]]:
    return summary[columns.UID].to_pylist(), summary[columns.STATUS].to_pylist()
