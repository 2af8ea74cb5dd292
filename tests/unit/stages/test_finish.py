"""The time that a run took, and its end."""

import json
from datetime import datetime

from tests.unit.stages import owned_run
from verl_omni_core.stages.finish import STAGE, SUMMARY, finished_summary, seconds_worked
from verl_omni_core.stages.session import let_go


def at(clock: str) -> str:
    return f"2026-03-0{clock}+00:00"


def commit(session, step, stage, finished):
    session.store.attempt(step, stage, "key").commit([], rows=0, parents=[], producer={"finished": finished})


def take(config, since):
    session = owned_run.take(config)
    path = session.root / "epoch" / f"{session.ref.epoch}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"since": since}))
    return session


def test_time_counts_from_taking_a_run_to_its_owners_last_commit_and_not_between_owners(tmp_path):
    config = owned_run.make(tmp_path)
    first = take(config, at("1T08:00:00"))
    commit(first, 0, "validate", at("1T08:05:00"))
    commit(first, 1, "update", at("1T08:10:00.500"))
    commit(first, 1, "rollout", at("1T08:07:00"))
    owned_run.leave(first)
    owned_run.leave(take(config, at("2T08:00:00")))  # ended before it committed anything
    session = take(config, at("4T08:00:00"))
    commit(session, 2, "update", at("4T08:01:00"))
    now = datetime.fromisoformat(at("4T08:02:00"))
    assert seconds_worked(session, now) == 10 * 60 + 0.5 + 2 * 60
    let_go(session.ref.root)


def test_a_run_is_finished_with_the_steps_under_which_its_summary_is_committed(tmp_path):
    config = owned_run.make(tmp_path)
    session = owned_run.take(config)
    attempt = session.store.attempt(3, STAGE, "key")
    attempt.commit([attempt.write_file(SUMMARY, b"Run: short")], rows=3, parents=[], producer={})
    owned_run.leave(session)
    assert finished_summary(session.root, 3) == "Run: short"
    assert finished_summary(session.root, 4) is None
