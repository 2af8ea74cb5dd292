"""A run has one owner, and every takeover is a new epoch."""

import multiprocessing
import os
import time

import pytest

from tests.unit.store.processes import LIMIT_S, kill_after, start
from verl_omni_core.errors import FencedError, StoreError
from verl_omni_core.store.lease import check_epoch, holder, is_owned, newest_epoch, take_ownership

HOLD = 'own = take_ownership(root, "flow of process one")\nsay("epoch", own.epoch)\ntime.sleep(60)\n'


def test_epochs_only_grow(tmp_path):
    assert newest_epoch(tmp_path) == 0
    for expected in (1, 2, 3):
        with take_ownership(tmp_path, "me") as own:
            assert own.epoch == newest_epoch(tmp_path) == expected
            own.check()
    check_epoch(tmp_path, 3)
    with pytest.raises(FencedError, match=r"epoch 2 .* has ended: epoch 3 belongs to me"):
        check_epoch(tmp_path, 2)


def test_a_second_owner_is_refused_with_who_holds_the_run(tmp_path):
    with take_ownership(tmp_path, "flow a") as own:
        assert is_owned(tmp_path)
        with pytest.raises(FencedError, match=rf"owned by flow a \(process {os.getpid()} on .*\); wait for it"):
            take_ownership(tmp_path, "flow b")
        own.check()
        assert newest_epoch(tmp_path) == 1
    assert not is_owned(tmp_path)


def test_a_process_holds_the_run_until_it_is_killed_and_then_it_can_be_taken(tmp_path):
    process = start(HOLD + "", tmp_path)
    assert process.stdout.readline() == "epoch 1\n"
    with pytest.raises(FencedError, match=r"flow of process one"):
        take_ownership(tmp_path, "me")
    process.kill()
    process.wait(LIMIT_S)
    with take_ownership(tmp_path, "me") as own:
        assert own.epoch == 2
        assert holder(tmp_path)["owner"] == "me"


def test_a_forked_child_does_not_keep_the_run_of_its_dead_parent(tmp_path):
    program = """
import os
own = take_ownership(root, "parent")
if os.fork() == 0:
    os.close(1); time.sleep(20); os._exit(0)
say("forked")
time.sleep(60)
"""
    process = start(program, tmp_path)
    kill_after(process, "forked")
    take_ownership(tmp_path, "me").release()


def test_a_fork_does_not_end_the_ownership_of_the_parent(tmp_path):
    with take_ownership(tmp_path, "parent"):
        child = multiprocessing.get_context("fork").Process(target=os.getpid)
        child.start()
        child.join(LIMIT_S)
        assert is_owned(tmp_path)


def test_looking_does_not_take(tmp_path):
    assert not is_owned(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_glance_at_the_wrong_moment_does_not_refuse_an_owner(tmp_path):
    import fcntl

    take_ownership(tmp_path, "first").release()
    descriptor = os.open(tmp_path / ".lock", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    pid = os.fork()
    if pid == 0:  # lets go a little later; the parent's own handle closes first
        time.sleep(0.2)
        os._exit(0)
    os.close(descriptor)
    with take_ownership(tmp_path, "second") as own:
        assert own.epoch == 2
    os.waitpid(pid, 0)


def test_releasing_twice_is_harmless_and_does_not_release_the_next_owner(tmp_path):
    first = take_ownership(tmp_path, "first")
    first.release()
    second = take_ownership(tmp_path, "second")
    first.release()
    assert is_owned(tmp_path)
    second.release()


def test_a_folder_that_does_not_exist_cannot_be_owned(tmp_path):
    with pytest.raises(StoreError, match=r"create the run"):
        take_ownership(tmp_path / "none", "me")


def test_a_leftover_of_a_broken_lock_service_is_recognised(tmp_path, monkeypatch):
    (tmp_path / "epoch").mkdir()
    monkeypatch.setattr("verl_omni_core.store.lease.newest_epoch", lambda _: 0)
    (tmp_path / "epoch" / "1.json").write_text('{"owner": "x"}')
    with pytest.raises(FencedError, match=r"was taken by"):
        take_ownership(tmp_path, "me")
    assert not is_owned(tmp_path)
