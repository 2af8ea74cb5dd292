"""The ledger keeps every record, in order, from one writer at a time."""

import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.store.processes import LIMIT_S, answers, kill_after, start
from verl_omni_core.batches.schema import SCHEMAS, check_schema
from verl_omni_core.errors import ContractError, FencedError, StoreError
from verl_omni_core.store.ledger import Ledger, standing


def update(step: int) -> dict:
    return {
        "update_id": f"u{step}", "step": step, "epoch": 0, "minibatch": 0, "kind": "opt", "version_before": step - 1,
        "version_after": step, "batch_digest": "b", "weights_digest": "w", "skipped": False, "metrics": {"loss": 0.5},
        "snapshot": "s",
    }  # fmt: skip


def test_records_come_back_in_order_with_their_numbers(tmp_path):
    ledger = Ledger(tmp_path)
    assert ledger.records() == []
    assert [ledger.append(update(step)) for step in (1, 2, 3)] == [1, 2, 3]
    for reader in (ledger, Ledger(tmp_path)):
        assert [(r["sequence"], r["step"], r["metrics"]) for r in reader.records()] == [
            (n, n, {"loss": 0.5}) for n in (1, 2, 3)
        ]
    assert sorted(p.name for p in (tmp_path / "ledger").iterdir()) == [f"{n:012d}.json" for n in (1, 2, 3)]


def test_the_table_is_a_view_of_the_records(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.append(update(1))
    ledger.append(update(2) | {"weights_digest": None})
    table = ledger.as_table()
    check_schema(table, "updates")
    assert table["sequence"].to_pylist() == [1, 2]
    assert table["weights_digest"].to_pylist() == ["w", None]
    assert json.loads(table["metrics_json"][0].as_py()) == {"loss": 0.5}
    assert json.loads(table["record_json"][0].as_py())["snapshot"] == "s"
    for column in SCHEMAS["updates"].columns:
        assert table.schema.field(column.name).type == column.type
    assert Ledger(tmp_path / "none").as_table().num_rows == 0


def test_a_second_writer_is_refused_by_the_number_that_is_taken(tmp_path):
    one, two = Ledger(tmp_path), Ledger(tmp_path)
    one.append(update(1))
    two.append(update(2))
    for _ in range(2):
        with pytest.raises(FencedError, match=r"somebody else wrote to the ledger"):
            one.append(update(2))
    assert len(one.records()) == 2
    with pytest.raises(FencedError):  # reading what the other wrote does not make it the owner
        one.append(update(3))
    assert [record["step"] for record in Ledger(tmp_path).records()] == [1, 2]


def test_threads_of_one_owner_append_without_gaps(tmp_path):
    ledger = Ledger(tmp_path)
    threads = [threading.Thread(target=lambda: [ledger.append({"step": 1}) for _ in range(5)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert [record["sequence"] for record in Ledger(tmp_path).records()] == list(range(1, 21))


def test_a_lost_record_is_named(tmp_path):
    ledger = Ledger(tmp_path)
    for step in (1, 2, 3):
        ledger.append(update(step))
    (tmp_path / "ledger" / f"{2:012d}.json").unlink()
    for use in (lambda: Ledger(tmp_path).records(), lambda: Ledger(tmp_path).append(update(4))):
        with pytest.raises(StoreError, match=r"lacks record 2 of 3"):
            use()


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("damage", [lambda t: t[:20], lambda t: t.replace('"opt"', '"ema"'), lambda text: text[:0]])
def test_a_damaged_record_is_named_the_last_one_too(tmp_path, number, damage):
    ledger = Ledger(tmp_path)
    for step in (1, 2, 3):
        ledger.append(update(step))
    path = tmp_path / "ledger" / f"{number:012d}.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(StoreError, match=rf"record {number} .*damaged"):
        Ledger(tmp_path).records()


def test_a_record_replaced_by_another_valid_one_is_found(tmp_path):
    other = Ledger(tmp_path / "other")
    (tmp_path / "other").mkdir()
    ledger = Ledger(tmp_path)
    for step in (1, 2):
        ledger.append(update(step))
    other.append(update(9))
    name = f"{1:012d}.json"
    (tmp_path / "ledger" / name).write_bytes((tmp_path / "other" / "ledger" / name).read_bytes())
    with pytest.raises(StoreError, match=r"record 2 .*the one before it was changed"):
        Ledger(tmp_path).records()


@pytest.mark.parametrize("record", [{"sequence": 1}, {"x": object()}, {"fence_epoch": 2}])
def test_a_record_that_cannot_be_kept_is_refused_and_writes_nothing(tmp_path, record):
    with pytest.raises(ContractError):
        Ledger(tmp_path).append(record)
    assert Ledger(tmp_path).records() == []


def test_a_writer_killed_in_mid_append_leaves_the_record_whole_or_absent(tmp_path):
    program = """
from verl_omni_core.store import durable_files as module
link = module.publish
def slow(*args, **options):
    say("there"); time.sleep(60)
ledger = Ledger(root)
ledger.append({"step": 1})
module.publish = slow
ledger.append({"step": 2})
"""
    process = start(program, tmp_path)
    kill_after(process, "there")
    ledger = Ledger(tmp_path)
    assert [record["step"] for record in ledger.records()] == [1]
    assert ledger.append({"step": 2}) == 2


def test_of_two_processes_that_append_the_same_number_one_is_fenced(tmp_path):
    program = """
ledger = Ledger(root)
ledger.records()
say("ready")
sys.stdin.readline()
try:
    say(ledger.append({"writer": sys.argv[2]}))
except PermissionError as error:
    say("fenced")
"""
    racers = [start(program, tmp_path, name) for name in ("a", "b")]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    assert sorted(answers(racer)[-1] for racer in racers) == ["1", "fenced"]
    assert len(Ledger(tmp_path).records()) == 1


@given(st.lists(st.integers(-1, 5), max_size=40))
def test_after_any_steps_and_rewinds_each_step_up_to_the_present_one_stands_once(moves):
    """-1 makes the next step, in two updates; another number goes back to that step, if the run is that far."""
    records, present = [], 0
    for number, move in enumerate(moves):
        if move < 0:
            present += 1
            records += [{"kind": "opt", "step": present, "made": number, "minibatch": half} for half in (0, 1)]
        else:
            records.append({"kind": "rewind", "step": present, "to_version": min(move, present)})
            present = min(move, present)
    kept = standing(records)
    assert [(r["step"], r["minibatch"]) for r in kept] == [(s, half) for s in range(1, present + 1) for half in (0, 1)]
    newest = {(r["step"], r["minibatch"]): r["made"] for r in records if r["kind"] == "opt"}
    assert all(r["made"] == newest[r["step"], r["minibatch"]] for r in kept)


@given(count=st.integers(1, 8), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_record_that_is_missing_is_told_without_reading_the_others(tmp_path_factory, count, data):
    lost = data.draw(st.sets(st.integers(1, count)))
    root = tmp_path_factory.mktemp("run")
    ledger = Ledger(root)
    for step in range(1, count + 1):
        ledger.append({"step": step})
    paths = {number: root / "ledger" / f"{number:012d}.json" for number in range(1, count + 1)}
    for number in lost:
        paths[number].unlink()
    left = sorted(set(paths) - lost)
    for number in left[:-1]:
        paths[number].write_text("not read")
    if not left or not lost:  # a ledger without any record is that of a run that keeps none
        Ledger(root).check_complete(count)
        return
    with pytest.raises(StoreError, match=f"lacks record {min(lost)} of|ends with step {left[-1]}, but the update of"):
        Ledger(root).check_complete(count)


def test_a_replay_that_was_noted_under_the_step_that_it_repeated_does_not_end_the_ledger_early(tmp_path):
    ledger = Ledger(tmp_path)
    for step in (1, 2, 3):
        ledger.append({"step": step, "kind": "opt"})
    ledger.append({"step": 2, "kind": "fork"})
    Ledger(tmp_path).check_complete(3)
    with pytest.raises(StoreError, match="ends with step 3, but the update of step 4"):
        Ledger(tmp_path).check_complete(4)
