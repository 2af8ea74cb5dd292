"""The prompt files: texts to train on and a fixed held-out set that shares none of their substrings."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.glyph.text import ALPHABET, TEXT_LENGTH, prompt_of

TRAIN_ROWS = 8192
VALIDATION_ROWS = 128
SHARED_AT_MOST = 2  # characters in a row that a training text may share with a held-out one
SEED = 20


def split_texts(seed: int = SEED) -> tuple[list[str], list[str]]:
    """Distinct training and held-out texts; no training text holds three neighbouring characters of a held-out one."""
    source = random.Random(seed)
    validation = sorted(_distinct(VALIDATION_ROWS, source, set()))
    forbidden = {piece for text in validation for piece in pieces(text)}
    train = _distinct(TRAIN_ROWS, source, forbidden)
    return train, validation


def pieces(text: str) -> list[str]:
    """All substrings one longer than what may be shared."""
    length = SHARED_AT_MOST + 1
    return [text[start : start + length] for start in range(len(text) - length + 1)]


def write_prompts(folder: Path) -> None:
    """Write ``train.parquet`` and ``validation.parquet``."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, texts in zip(("train", "validation"), split_texts(), strict=True):
        pq.write_table(_table(texts, split), folder / f"{split}.parquet", compression="zstd")


def read_texts(path: Path) -> list[str]:
    """The target texts of a prompt file."""
    return pq.read_table(path, columns=["ground_truth"])["ground_truth"].to_pylist()


def _distinct(count: int, source: random.Random, forbidden: set[str]) -> list[str]:
    texts: dict[str, None] = {}
    while len(texts) < count:
        text = "".join(source.choice(ALPHABET) for _ in range(TEXT_LENGTH))
        if not forbidden.intersection(pieces(text)):
            texts[text] = None
    return list(texts)


def _table(texts: list[str], split: str) -> pa.Table:
    return pa.table(
        {
            "prompt": [prompt_of(text) for text in texts],
            "ground_truth": texts,
            "data_source": ["glyph"] * len(texts),
            "extra_info": [json.dumps({"split": split, "index": index}) for index in range(len(texts))],
        }
    )
