"""Prompt tables: parquet, JSON or JSON lines in, one checked Arrow table out.

Rows are numbered from 0, as ``dataset_row``, in every message.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from verl_omni_core.batches.columns import (
    AGENT_NAME,
    DATA_SOURCE,
    DATASET_ROW,
    EXTRA_INFO_JSON,
    GROUND_TRUTH,
    MESSAGES_JSON,
    NEGATIVE_MESSAGES_JSON,
    NEGATIVE_PROMPT,
    PROMPT,
    REWARD_MODEL_JSON,
)
from verl_omni_core.errors import DataError
from verl_omni_core.identity import digest
from verl_omni_core.registry import nearest
from verl_omni_core.settings.resolve import Split, data_path
from verl_omni_core.settings.run import RunConfig

TokenCounts = Callable[[str], Mapping[str, tuple[int, int]]]
"""A prompt to, for each tokenizer by name, the tokens it needs and the tokens the encoder takes."""

_DIGESTED_ROWS = 4096
_SUFFIXES = (".parquet", ".json", ".jsonl")


def prompts_of(config: RunConfig, split: Split) -> pa.Table:
    """Return the prompts that a run reads for ``split``, as :func:`read_prompts` does; its errors name the setting."""
    data = config.data
    try:
        return read_prompts(
            data_path(config, split),
            prompt_column=data.prompt_column,
            negative_prompt_column=data.negative_prompt_column,
            ground_truth_column=data.ground_truth_column,
            max_rows=data.max_validation_prompts if split == "validation" else None,
        )
    except DataError as error:
        message = str(error)
        raise DataError(message if message.startswith("data.") else f"data.{split}: {message}") from error


def digest_of(rows: pa.Table) -> str:
    """Return the sha256 of prompts as :func:`read_prompts` returns them: equal rows in equal order, equal digests."""
    seen = hashlib.sha256()
    for batch in rows.to_batches(max_chunksize=_DIGESTED_ROWS):
        for row in batch.to_pylist():
            seen.update(digest(row).encode())
    return seen.hexdigest()


@dataclass(frozen=True)
class _Source:
    """A file's columns as they were read: Arrow from parquet, Python values from JSON."""

    columns: dict[str, list[Any] | pa.ChunkedArray]
    rows: int

    def cells(self, name: str) -> list[Any]:
        column = self.columns[name]
        return column if isinstance(column, list) else column.to_pylist()

    def arrow(self, name: str) -> pa.Array | pa.ChunkedArray:
        column = self.columns[name]
        if not isinstance(column, list):
            return column
        try:
            return pa.array(column)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            return _strings([v if v is None or isinstance(v, str) else _canonical(v) for v in column])


def read_prompts(
    path: str | Path,
    *,
    prompt_column: str = "prompt",
    negative_prompt_column: str | None = None,
    ground_truth_column: str | None = "ground_truth",
    max_rows: int | None = None,
) -> pa.Table:
    """Read a prompt table.

    Args:
        path: a ``.parquet``, ``.json`` (a list of objects) or ``.jsonl`` file.
        prompt_column: a text, or a list of ``{role, content}`` messages, in each row.
        negative_prompt_column: the same for a negative prompt; may be missing in a row.
        ground_truth_column: what scorers compare with. Where a row has none, or the file no column of the default
            name, ``reward_model.ground_truth`` of the row is used, if it has that.
        max_rows: read only the first of them.
    Returns: ``dataset_row`` int64, ``prompt`` string (the text of all user messages), ``messages_json``,
        ``negative_prompt?``, ``negative_messages_json?``, ``ground_truth?``, ``data_source``, ``reward_model_json?``,
        ``extra_info_json?``, then all other columns of the file, media included, untouched.
    Raises:
        DataError: no such file, another format, no such column (with the nearest that exists), no rows, a row that
            cannot be read or has an empty prompt (with its number).
    """
    path = Path(path)
    source = _read(path, max_rows)
    # a file without ground truths is no fault, but a column that somebody asked for is
    truth = None if ground_truth_column == GROUND_TRUTH else ground_truth_column
    _check_columns(path, source, prompt_column, negative_prompt_column, truth)
    if not source.rows:
        raise DataError(f"{path} has no rows; give a file with at least one prompt")
    prompts = [_messages(path, row, prompt_column, v) for row, v in enumerate(source.cells(prompt_column))]
    for row, messages in enumerate(prompts):
        if messages is None or not _text(messages).strip():
            raise DataError(
                f"{path}, row {row}: the prompt in column {prompt_column!r} is empty; fill it or remove the row"
            )
    columns: dict[str, Any] = {
        DATASET_ROW: pa.array(range(source.rows), pa.int64()),
        PROMPT: _strings([_text(messages) for messages in prompts if messages is not None]),
        MESSAGES_JSON: _strings([_canonical(messages) for messages in prompts]),
    }
    used = {prompt_column, negative_prompt_column, ground_truth_column, "reward_model", "extra_info"}
    if negative_prompt_column is not None:
        values = source.cells(negative_prompt_column)
        negatives = [_messages(path, row, negative_prompt_column, value) for row, value in enumerate(values)]
        columns[NEGATIVE_PROMPT] = _strings([None if m is None else _text(m) for m in negatives])
        columns[NEGATIVE_MESSAGES_JSON] = _strings([None if m is None else _canonical(m) for m in negatives])
    columns |= _scoring_columns(path, source, ground_truth_column)
    for name in (DATA_SOURCE, AGENT_NAME):
        if name in source.columns:
            columns[name] = _strings(["" if v is None else str(v) for v in source.cells(name)])
            used.add(name)
    columns.setdefault(DATA_SOURCE, _strings([""] * source.rows))
    for name in source.columns:
        if name not in used and name not in columns:
            columns[name] = source.arrow(name)
    return pa.table(columns)


def check_lengths(rows: pa.Table, token_counts: TokenCounts, policy: Literal["error", "truncate"]) -> int:
    """Check that every text encoder takes every prompt, negative ones included.

    Args:
        rows: from :func:`read_prompts`.
        token_counts: counts a prompt's tokens; see :data:`TokenCounts`.
        policy: refuse the first prompt that is too long, or count them.
    Returns: the rows that will be cut; 0 under ``error``.
    Raises:
        DataError: a prompt is too long under ``error``; names row, tokenizer, what was seen and what is allowed.
    """
    names = [name for name in (PROMPT, NEGATIVE_PROMPT) if name in rows.column_names]
    known: dict[str, Mapping[str, tuple[int, int]]] = {}
    cut = 0
    for row in range(rows.num_rows):
        over = False
        for name in names:
            text = rows[name][row].as_py()
            if text is None:
                continue
            if text not in known:
                known[text] = token_counts(text)
            for tokenizer, (seen, allowed) in known[text].items():
                if seen > allowed and policy == "error":
                    number = rows[DATASET_ROW][row].as_py()
                    raise DataError(
                        f"row {number}: the {name.replace('_', ' ')} has {seen} tokens for {tokenizer!r}, which "
                        f"takes {allowed}; shorten it, or set data.overlong to 'truncate'"
                    )
                over |= seen > allowed
        cut += over
    return cut


def _read(path: Path, max_rows: int | None) -> _Source:
    if path.suffix.lower() not in _SUFFIXES:
        raise DataError(f"{path} is no prompt file by its name; expected {', '.join(_SUFFIXES)}")
    if not path.is_file():
        there = sorted(p.name for p in path.parent.glob("*") if p.suffix in _SUFFIXES) if path.parent.is_dir() else []
        hint = nearest(path.name, there) if there else f"its folder {path.parent} has no prompt file"
        raise DataError(f"prompt file {path} does not exist; {hint}")
    if path.suffix.lower() == ".parquet":
        table = _read_parquet(path, max_rows)
        return _Source({name: table[name] for name in table.column_names}, table.num_rows)
    records = _jsonl_records(path) if path.suffix.lower() == ".jsonl" else _json_records(path)
    kept = list(islice(records, max_rows))
    names = list(dict.fromkeys(name for record in kept for name in record))
    return _Source({name: [record.get(name) for record in kept] for name in names}, len(kept))


def _read_parquet(path: Path, max_rows: int | None) -> pa.Table:
    row = 0
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file ({error}); make it again") from error
    groups = []
    for group in range(file.num_row_groups):
        if max_rows is not None and row >= max_rows:
            break
        size = file.metadata.row_group(group).num_rows
        try:
            groups.append(file.read_row_group(group))
        except (pa.ArrowException, OSError) as error:
            first = _first_unreadable(file, group, size)
            raise DataError(
                f"{path}, row {row + first}: cannot be read ({error}); the file is damaged there, make it again "
                "or remove the rows from there on"
            ) from error
        row += size
    table = pa.concat_tables(groups) if groups else file.schema_arrow.empty_table()
    return table.slice(0, max_rows)


def _first_unreadable(file: pq.ParquetFile, group: int, size: int) -> int:
    """Return the first row of a row group that cannot be read: pages before it can."""
    readable = 0
    try:
        for batch in file.iter_batches(batch_size=1, row_groups=[group]):
            readable += batch.num_rows
    except (pa.ArrowException, OSError):
        pass  # its place is what was looked for
    return min(readable, size - 1)


def _jsonl_records(path: Path) -> Iterator[dict[str, Any]]:
    row = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _record(path, row, line, f" (line {number})")
                row += 1


def _json_records(path: Path) -> Iterator[dict[str, Any]]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(
            f"{path} is not JSON ({error}); expected a list of objects, or name the file .jsonl if it has one "
            "object a line"
        ) from error
    if not isinstance(value, list):
        raise DataError(f"{path} holds a JSON {type(value).__name__}; expected a list of objects")
    for row, item in enumerate(value):
        if not isinstance(item, dict):
            raise DataError(
                f"{path}, row {row}: got a JSON {type(item).__name__}, expected an object with columns as keys"
            )
        yield item


def _record(path: Path, row: int, line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, row {row}{where}: cannot be read as JSON ({error}); correct or remove it") from error
    if not isinstance(value, dict):
        raise DataError(
            f"{path}, row {row}{where}: got a JSON {type(value).__name__}, expected an object with columns as keys"
        )
    return value


def _check_columns(path: Path, source: _Source, prompt: str, negative: str | None, truth: str | None) -> None:
    named = {"data.prompt_column": prompt, "data.negative_prompt_column": negative, "data.ground_truth_column": truth}
    for setting, name in named.items():
        if name is not None and name not in source.columns:
            if not source.columns:
                raise DataError(f"{path} has no rows; give a file with at least one prompt")
            raise DataError(
                f"{path} has no column {name!r}, which {setting} names; {nearest(name, list(source.columns))}"
            )


def _messages(path: Path, row: int, column: str, value: Any) -> list[dict[str, Any]] | None:
    """Return a cell as chat messages; a text is one user message."""
    if value is None:
        return None
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    good = isinstance(value, list) and all(
        isinstance(item, dict) and isinstance(item.get("role"), str) and isinstance(item.get("content"), str | list)
        for item in value
    )
    if not good:
        raise DataError(
            f"{path}, row {row}: column {column!r} holds {str(value)[:80]!r} ({type(value).__name__}); expected a "
            "text or a list of {role, content} messages"
        )
    # Arrow gives each message the keys of all others, without a value
    return [{key: part for key, part in item.items() if part is not None} for item in value]


def _text(messages: list[dict[str, Any]]) -> str:
    """Return what the user says; template text of other roles is the model adapter's business."""
    parts = []
    for message in messages:
        if message["role"] != "user":
            continue
        content = message["content"]
        pieces = [content] if isinstance(content, str) else [p.get("text") for p in content if isinstance(p, dict)]
        parts += [piece for piece in pieces if piece]
    return "\n".join(parts)


def _scoring_columns(path: Path, source: _Source, ground_truth_column: str | None) -> dict[str, pa.Array]:
    columns: dict[str, pa.Array] = {}
    rewards = _objects(path, source, "reward_model")
    truths: list[Any] = [None] * source.rows
    if ground_truth_column is not None and ground_truth_column in source.columns:
        truths = source.cells(ground_truth_column)
    truths = [
        (reward or {}).get("ground_truth") if truth is None else truth
        for truth, reward in zip(truths, rewards, strict=True)
    ]
    if any(truth is not None for truth in truths):
        columns[GROUND_TRUTH] = _strings([t if t is None or isinstance(t, str) else _canonical(t) for t in truths])
    if any(reward is not None for reward in rewards):
        columns[REWARD_MODEL_JSON] = _strings([None if r is None else _canonical(r) for r in rewards])
    extras = _objects(path, source, "extra_info")
    if any(extra is not None for extra in extras):
        columns[EXTRA_INFO_JSON] = _strings([None if e is None else _canonical(e) for e in extras])
    return columns


def _objects(path: Path, source: _Source, name: str) -> list[dict[str, Any] | None]:
    """Return a column of objects, given as such or as JSON text; none where it is missing."""
    if name not in source.columns:
        return [None] * source.rows
    values = []
    for row, value in enumerate(source.cells(name)):
        try:
            parsed = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            raise DataError(
                f"{path}, row {row}: column {name!r} is not JSON ({error}); correct or remove it"
            ) from error
        if parsed is not None and not isinstance(parsed, dict):
            raise DataError(f"{path}, row {row}: column {name!r} holds {str(value)[:80]!r}, expected an object")
        # Arrow gives each row the keys of all others, without a value
        values.append(parsed if parsed is None else {key: v for key, v in parsed.items() if v is not None})
    return values


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _strings(values: list[str | None]) -> pa.Array:
    return pa.array(values, pa.string())
