"""One process of a flow that is to meet a fault: ``python -m tests.faults.driver CONFIG EVENTS``.

It calls the real flow. Before, it wraps what the product does on its way, so that this process notes every attempt and
every commit in EVENTS, one JSON line each, and dies where the plan says so.
"""

import argparse
import functools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

import flows.online
from tests.faults.injected import planned
from verl_omni_core.errors import VerlOmniError
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.attempt import SHARDS, Attempt
from verl_omni_core.store.ledger import Ledger
from verl_omni_core.workers import actors, train_group
from verl_omni_core.workers.actors import Actors
from verl_omni_core.workers.train_group import TrainGroup

STAGES = (
    *("plan_step", "generate", "score", "recompute_old_log_probs", "evaluate_reference", "estimate_advantages"),
    *("train_on", "save_checkpoint", "sync_weights", "validate_policy", "draw_preview", "log_step"),
)
"""The tasks of ``flows.online`` that are a stage each."""
_SENT_S = 0.3
"""After this long a command has reached its actors."""
_POLL_S = 0.005


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("events", type=Path)
    parser.add_argument("--twice", action="store_true")
    arguments = parser.parse_args()
    _note_and_strike(arguments.events)
    if arguments.twice:
        for name in STAGES:
            setattr(flows.online, name, _twice(getattr(flows.online, name)))
    config = RunConfig.model_validate_json(arguments.config.read_text())
    try:
        print(flows.online.online(config))
    except VerlOmniError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


def _note_and_strike(events: Path) -> None:
    """Wrap the product's own steps in this process."""
    begin, commit, append = RunStore.attempt, Attempt.commit, Ledger.append
    update, run_packs = TrainGroup.update_actor, Actors.run_packs
    lock = threading.Lock()

    def note(what: str, **facts: Any) -> None:
        with lock, events.open("a") as file:
            file.write(json.dumps({"time": time.time(), "what": what, **facts}) + "\n")

    @functools.wraps(begin)
    def attempt(self: RunStore, step: int, stage: str, key: str, **named: Any) -> Attempt:
        begun = begin(self, step, stage, key, **named)
        note("attempt", step=step, stage=stage, attempt=begun.name)
        planned.due("attempt.begun", step=step, stage=stage)
        return begun

    @functools.wraps(commit)
    def committing(self: Attempt, *arguments: Any, **named: Any) -> Any:
        planned.due("commit.ready", step=self.step, stage=self.stage)
        ref = commit(self, *arguments, **named)
        note("commit", step=self.step, stage=self.stage, attempt=ref.attempt)
        planned.due("commit.done", step=self.step, stage=self.stage)
        return ref

    @functools.wraps(append)
    def appending(self: Ledger, record: Any) -> int:
        number = append(self, record)
        planned.due("ledger.done", step=record["step"], update_id=record["update_id"])
        return number

    @functools.wraps(update)
    def updating(self: TrainGroup, command: Any) -> Any:
        result = update(self, command)
        planned.due("update.answered", step=command.step)
        return result

    @functools.wraps(run_packs)
    def drawing(self: Actors, packs: Any) -> Any:
        if planned.is_planned("packs.finished"):
            threading.Thread(target=_watch, args=(packs[0].attempt,), daemon=True).start()
        return run_packs(self, packs)

    RunStore.attempt, Attempt.commit, Ledger.append = attempt, committing, appending  # type: ignore[method-assign]
    TrainGroup.update_actor, Actors.run_packs = updating, drawing  # type: ignore[method-assign]
    train_group.wait_all = _before_waiting(train_group.wait_all, "trainer: update_actor", "update.sent", None)
    actors.wait_all = _before_waiting(actors.wait_all, "loading version", "sync.half", 1)


def _before_waiting(wait: Callable[..., Any], what: str, point: str, answers: int | None) -> Callable[..., Any]:
    """Strike once commands were sent: when so many of them are answered, or when they must have arrived."""

    @functools.wraps(wait)
    def waiting(references: Any, timeout_s: float, waited: str, **named: Any) -> Any:
        if waited.startswith(what) and planned.is_planned(point):
            ray.wait(list(references), num_returns=answers or 1, timeout=timeout_s if answers else _SENT_S)
            planned.due(point, command=waited)
        return wait(references, timeout_s, waited, **named)

    return waiting


def _watch(attempt: Attempt) -> None:
    """Strike when so many packs of a stage are finished shards."""
    while planned.is_planned("packs.finished"):
        finished = len(list((attempt.folder / SHARDS).glob("*.json")))
        planned.due("packs.finished", step=attempt.step, stage=attempt.stage, finished=finished)
        time.sleep(_POLL_S)


def _twice(task: Callable[..., Any]) -> Callable[..., Any]:
    def delivered(*arguments: Any) -> Any:
        first = task(*arguments)
        again = task(*arguments)
        if first != again:
            raise AssertionError(f"delivered twice, {task} answered {first}, then {again}")
        return first

    return delivered


if __name__ == "__main__":
    main()
