"""Which files this process wrote or has verified: others are checked against their digests before the first use."""

import os
import threading
from pathlib import Path

_TRUSTED_FILES = 4096
_trusted: dict[tuple[int, str, str], None] = {}
_trusted_lock = threading.Lock()


def trust(path: Path, digest: str) -> None:
    """Remember that this process wrote or has verified a file; the oldest of many are forgotten."""
    with _trusted_lock:
        _trusted[os.getpid(), str(path), digest] = None
        if len(_trusted) > _TRUSTED_FILES:
            del _trusted[next(iter(_trusted))]


def is_trusted(path: Path, digest: str) -> bool:
    """Say whether this process wrote or has verified a file."""
    return (os.getpid(), str(path), digest) in _trusted


# a fork in the middle of another thread's trust() would leave the child's lock held for ever
os.register_at_fork(after_in_child=lambda: globals().update(_trusted_lock=threading.Lock()))
