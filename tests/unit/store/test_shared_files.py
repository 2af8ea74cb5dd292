"""Files that two runs share, and folders that cannot be written."""

import os
from pathlib import Path

import pytest

from verl_omni_core.store.durable_files import link_or_copy, why_unwritable

OTHER_FILE_SYSTEM = Path("/dev/shm")


def test_a_file_is_shared_where_the_file_system_can(tmp_path):
    (tmp_path / "a").write_bytes(b"weights")
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").samefile(tmp_path / "b")


def test_a_file_is_copied_to_another_file_system(tmp_path):
    if not OTHER_FILE_SYSTEM.is_dir() or OTHER_FILE_SYSTEM.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system only")
    (tmp_path / "a").write_bytes(b"weights")
    target = OTHER_FILE_SYSTEM / f"copied-{os.getpid()}"
    try:
        link_or_copy(tmp_path / "a", target)
        assert target.read_bytes() == b"weights" and not target.samefile(tmp_path / "a")
    finally:
        target.unlink(missing_ok=True)


def test_a_file_that_is_there_is_not_replaced(tmp_path):
    (tmp_path / "a").write_bytes(b"new")
    (tmp_path / "b").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"old"


def test_a_folder_that_can_be_written_has_no_reason_not_to_be(tmp_path):
    before = tmp_path.stat().st_mtime_ns
    assert why_unwritable(tmp_path) is None
    assert tmp_path.stat().st_mtime_ns == before and list(tmp_path.iterdir()) == []
