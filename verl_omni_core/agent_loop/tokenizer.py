"""Token ids for a batch's ``prompts``, from a pipeline folder in diffusers format."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_omni_core.agent_loop.loops._contract import Tokenizer


def prompt_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the pipeline's first tokenizer; ids include special tokens and are not cut."""
    from transformers import AutoTokenizer

    tokenizer: Callable[..., Any] = AutoTokenizer.from_pretrained(str(Path(folder) / "tokenizer"))
    return lambda text: tokenizer(text)["input_ids"]
