"""The user's folder for what belongs to this machine and to no run: local services, copies of remote stores."""

import os
from pathlib import Path


def home() -> Path:
    """Return ``VERL_OMNI_HOME``, else ``~/.verl-omni``; made if it does not exist."""
    folder = Path(os.environ.get("VERL_OMNI_HOME", "~/.verl-omni")).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    return folder
