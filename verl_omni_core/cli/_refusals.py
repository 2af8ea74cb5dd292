"""Exit codes of errors: what cannot start is told from what failed."""

from collections.abc import Iterator
from contextlib import contextmanager

from verl_omni_core.errors import FencedError, VerlOmniError


@contextmanager
def before_anything_starts() -> Iterator[None]:
    """Let errors inside end the command with exit code 2: nothing was started, and nothing on disk was changed.

    A run that somebody else owns is no fault of the input, and keeps exit code 1.
    """
    try:
        yield
    except VerlOmniError as error:
        if not isinstance(error, FencedError):
            error.exit_code = 2
        raise
