"""Waiting for actors: in slices, with a deadline, and with what they raised as it was raised."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from verl_omni_core.errors import ContractError, DeadlineError, EngineError, StageLost

_SLICE_S = 2.0


def wait_all(
    references: Sequence[ray.ObjectRef],
    timeout_s: float,
    what: str,
    *,
    grace_s: float | None = None,
    progress: Callable[[], Mapping[str, int]] | None = None,
) -> list[Any]:
    """Wait for all answers and return them in order.

    Args:
        timeout_s: deadline; with ``progress`` only a standstill of that length ends the wait.
        what: is waited for; begins every message.
        grace_s: for calls that wait for each other: how long the others may go on once one has failed, seconds. None:
            they do not, and all of them are waited for.
        progress: returns counts, by name, of what the calls have done. Asked when ``timeout_s`` have passed without an
            answer; where a count has changed since, the wait goes on.

    Raises:
        StageLost: an actor died, or did not answer within the grace after another one had failed.
        DeadlineError: no answer in time. Else the first call's own error, once all have answered.
    """
    deadline = time.monotonic() + timeout_s
    pending = list(references)
    errors: dict[int, Exception] = {}
    counts: Mapping[str, int] | None = None
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, min(_SLICE_S, deadline - time.monotonic())))
        if done and progress is not None:
            deadline = time.monotonic() + timeout_s
        for reference in done:
            try:
                ray.get(reference)
            except Exception as error:  # noqa: BLE001 - raised below, once it is known what became of the others
                errors[references.index(reference)] = error
                if grace_s is not None:
                    deadline = min(deadline, time.monotonic() + grace_s)
        if pending and time.monotonic() >= deadline:
            before, counts = counts, None if progress is None else progress()
            if counts == before:
                break
            deadline = time.monotonic() + timeout_s
    _check(errors, len(pending), len(references), what, grace_s)
    if pending:
        seen = "".join(f", after {count} {name}" for name, count in (counts or {}).items())
        raise DeadlineError(
            f"{what} {'took longer than' if progress is None else 'stood still for'} {timeout_s:.0f} s{seen}; raise "
            "the deadline, or see the actors' logs"
        )
    return ray.get(list(references))


def _check(errors: Mapping[int, Exception], pending: int, total: int, what: str, grace_s: float | None) -> None:
    """Raise what the failed calls, by position, mean for the caller."""
    if not errors:
        return
    dead = {index: error for index, error in errors.items() if isinstance(error, ray.exceptions.RayActorError)}
    if dead:
        first = dead[min(dead)]
        raise StageLost(
            f"{what}: actor {min(dead)} of {total} died ({_one_line(first)}); start the stage again, it goes on from "
            "what is committed"
        ) from first
    if pending and grace_s is not None:
        error = next(iter(errors.values()))
        raise StageLost(
            f"{what}: {pending} of {total} actors did not answer within {grace_s:.0f} s after another one failed "
            f"({_one_line(error)})"
        ) from error
    raise _own_error([errors[index] for index in sorted(errors)])


def _own_error(errors: list[Exception]) -> Exception:
    """Return what an actor raised. Where one rank refused, the others only say that another one did."""
    causes = [error.cause if isinstance(error, ray.exceptions.RayTaskError) else error for error in errors]
    own = [cause for cause in causes if isinstance(cause, Exception) and not _is_echo(cause)]
    return (
        own or [c if isinstance(c, Exception) else EngineError(str(e)) for c, e in zip(causes, errors, strict=True)]
    )[0]


def _is_echo(error: Exception) -> bool:
    return isinstance(error, ContractError) and str(error).startswith("another rank refused")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
