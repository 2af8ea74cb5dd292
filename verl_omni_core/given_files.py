"""Files that a user gives: JSON objects and safetensors, refused with one message where they cannot be read."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_omni_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
        FileNotFoundError: there is no such file. ConfigError: it is damaged, or holds something else.
    """
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is damaged ({error}); give a whole copy of it") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{str(path)!r} holds a {type(value).__name__}, expected a JSON object; give the right file")
    return value


def tensors(path: Path) -> "dict[str, Tensor]":
    """Return the tensors of a safetensors file, by name.

    Raises:
        FileNotFoundError: there is no such file. ConfigError: it is damaged, or of another format.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # loads torch, which settings without tensors need not

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ConfigError(
            f"{str(path)!r} is damaged or no safetensors file ({error}); give a whole copy of it"
        ) from error
