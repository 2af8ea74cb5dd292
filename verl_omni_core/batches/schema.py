"""Versioned schemas of the tables between stages, and the metadata that every stored file carries.

A reader accepts files of its own major version and any minor one: a minor version adds columns, and columns that a
reader does not know are carried through untouched. Torch is not imported here.
"""

import dataclasses
import json
from dataclasses import dataclass

import pyarrow as pa

from verl_omni_core.errors import ContractError

NAME = pa.dictionary(pa.int32(), pa.string())
"""A string column with few different values."""


@dataclass(frozen=True)
class Tensors:
    """One tensor of one shape a row; ``dims`` names the dimensions of a row, for the ranks that have names."""

    dtype: str | None = None
    """The only dtype allowed; none allows any."""
    dims: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Jagged:
    """Tensors that differ in their first dimension."""

    dtype: str | None = None


@dataclass(frozen=True)
class Column:
    """One column of a table's contract."""

    name: str
    type: pa.DataType | Tensors | Jagged
    nullable: bool = False
    required: bool = True


@dataclass(frozen=True)
class TableSchema:
    """What a table must hold. Columns beyond these are allowed."""

    name: str
    columns: tuple[Column, ...]
    major: int = 1
    minor: int = 0

    @property
    def version(self) -> str:
        """``major.minor``."""
        return f"{self.major}.{self.minor}"

    @property
    def label(self) -> str:
        """Name and version, as manifests record it."""
        return f"{self.name}/{self.version}"


@dataclass(frozen=True, kw_only=True)
class FileMetadata:
    """Where a stored table comes from; written into the metadata of its Arrow schema."""

    run_id: str
    step: int
    stage: str
    shard: int
    attempt_id: str
    fence_epoch: int
    config_digest: str = ""
    code_version: str = ""
    weights_version: int | None = None
    """Of the model that produced the rows, if one did."""
    parents: tuple[str, ...] = ()
    """Digests of the manifests that the rows were computed from."""
    row_order: str = ""
    """Column that the rows are sorted by; empty where the order means nothing."""


def with_metadata(table: pa.Table, schema_id: str, metadata: FileMetadata | None = None) -> pa.Table:
    """Return ``table`` with its schema's id and version and, if given, its origin in the schema metadata.

    Metadata under other keys is kept. A ``schema_id`` that this package does not define gets version 1.0.
    """
    version = SCHEMAS[schema_id].version if schema_id in SCHEMAS else "1.0"
    entries = {"schema_id": schema_id, "schema_version": version}
    if metadata is not None:
        for field in dataclasses.fields(metadata):
            value = getattr(metadata, field.name)
            entries[field.name] = value if isinstance(value, str) else json.dumps(value)
    return table.replace_schema_metadata({**(table.schema.metadata or {}), **entries})


def metadata_of(schema: pa.Schema) -> FileMetadata:
    """Return the origin that :func:`with_metadata` wrote.

    Raises:
        ContractError: the schema carries none.
    """
    raw = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    values = {}
    for field in dataclasses.fields(FileMetadata):
        if field.name not in raw:
            raise ContractError(f"schema metadata has no {field.name!r}; the file was not written by a run's store")
        values[field.name] = raw[field.name] if field.type is str else json.loads(raw[field.name])
    values["parents"] = tuple(values["parents"])
    return FileMetadata(**values)


def schema_label(schema: pa.Schema) -> str:
    """Return name and version from schema metadata, such as ``trajectories/1.0``; empty if there are none."""
    raw = schema.metadata or {}
    if b"schema_id" not in raw:
        return ""
    return f"{raw[b'schema_id'].decode()}/{raw.get(b'schema_version', b'1.0').decode()}"


def check_schema(table: pa.Table | pa.Schema, schema_id: str) -> None:
    """Check that a table can be read as ``schema_id``: same id, same major version, all required columns.

    Raises:
        ContractError: says what was found, what was expected, and what to do.
    """
    schema = table.schema if isinstance(table, pa.Table) else table
    expected = SCHEMAS[schema_id]
    label = schema_label(schema)
    found_id, _, found_version = label.partition("/")
    if found_id != schema_id:
        raise ContractError(
            f"expected a table of schema {expected.label}, got {label or 'one without a schema id'}; "
            "read it under the name it was written with"
        )
    major = found_version.partition(".")[0]
    if major != str(expected.major):
        raise ContractError(
            f"table {schema_id!r} has schema version {found_version}, this package reads "
            f"{expected.major}.x; read it with the version that wrote it"
        )
    missing = [c.name for c in expected.columns if c.required and c.name not in schema.names]
    if missing:
        raise ContractError(f"table {schema_id!r} lacks the columns {missing}; it has {schema.names}")


def _text(*names: str, nullable: bool = False, required: bool = True) -> tuple[Column, ...]:
    return tuple(Column(name, pa.string(), nullable, required) for name in names)


def _int64(*names: str, required: bool = True) -> tuple[Column, ...]:
    return tuple(Column(name, pa.int64(), required=required) for name in names)


def _seconds(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, pa.float64()) for name in names)


def _maybe_float(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, pa.float32(), nullable=True, required=False) for name in names)


def _optional(name: str, kind: pa.DataType | Tensors | Jagged, nullable: bool = False) -> Column:
    return Column(name, kind, nullable, required=False)


_STEP = (("step",),)
_STEP_LATENTS = (("step", "token", "channel"), ("step", "channel", "height", "width"),
                 ("step", "channel", "frame", "height", "width"))  # fmt: skip
_LATENTS = tuple(dims[1:] for dims in _STEP_LATENTS)
_PIXELS = (("channel", "height", "width"), ("frame", "channel", "height", "width"))
_PER_STEP = Tensors("float32", _STEP)

_ID = (*_int64("sample_index"), *_text("sample_id", "uid"), Column("session", pa.int32()))
_TRAJECTORY_SCALARS = (
    *_ID,
    *_text("prompt_key"),
    *_int64("seed"),
    Column("status", NAME),
    *_text("error_class", "error_message", nullable=True, required=False),
    Column("attempts", pa.int32()),
    _optional("stop_reason", NAME, nullable=True),
    *_text("replica"),
    *_int64("min_version", "max_version"),
    Column("num_turns", pa.int32()),
    Column("num_preempted", pa.int32()),
    *_seconds("t_generate_s", "t_tool_s", "t_score_s"),
    _optional("sde_window_start", pa.int32(), nullable=True),
)
_REWARDS = (
    *_text("sample_id"),
    *_int64("sample_index"),
    Column("reward_name", NAME),
    Column("weight", pa.float32()),
    Column("required", pa.bool_()),
    Column("score", pa.float32(), nullable=True),
    Column("status", NAME),
    *_text("error", nullable=True),
    Column("attempts", pa.int32()),
    *_seconds("latency_s"),
    *_text("scorer_version"),
    *_text("endpoint", "extra_json", nullable=True, required=False),
)
_MEDIA_ITEM = pa.struct(
    [("kind", pa.string()), ("uri", pa.string()), ("bytes", pa.large_binary()), ("mime", pa.string()),
     ("sha256", pa.string())]
)  # fmt: skip
_WEIGHT_FILE = pa.struct([("uri", pa.string()), ("bytes", pa.int64()), ("sha256", pa.string())])
_IDS_BY_ENCODER = pa.map_(pa.string(), pa.list_(pa.int32()))

SCHEMAS = {
    table.name: table
    for table in (
        TableSchema("prompts", (
            *_text("prompt_key", "uid", "dataset"), *_int64("dataset_row"), Column("epoch", pa.int32()),
            Column("data_source", NAME), *_text("messages_json", "agent_name"),
            *_text("prompt", required=False), *_text("negative_prompt", nullable=True, required=False),
            *_text("negative_messages_json", "ground_truth", "reward_model_json", "extra_info_json", nullable=True,
                   required=False),
            _optional("prompt_ids", Jagged("int32")), _optional("negative_prompt_ids", Jagged("int32"), True),
            _optional("extra_prompt_ids", _IDS_BY_ENCODER, True),
            _optional("negative_extra_prompt_ids", _IDS_BY_ENCODER, True),
            _optional("media", pa.list_(_MEDIA_ITEM), True),
        )),
        TableSchema("requests", (
            *_ID, *_text("prompt_key"), *_int64("seed"), *_text("sampling_json"), Column("validate", pa.bool_()),
            *_int64("wanted_version", "priority"),
        )),
        TableSchema("trajectories", (
            *_TRAJECTORY_SCALARS,
            _optional("all_latents", Tensors("float32", _STEP_LATENTS)),
            _optional("all_next_latents", Tensors("float32", _STEP_LATENTS)),
            _optional("all_timesteps", _PER_STEP), _optional("rollout_log_probs", _PER_STEP),
            _optional("step_indices", Tensors("int64", _STEP)),
            _optional("latents_clean", Tensors("float32", _LATENTS)),
            _optional("train_timesteps", _PER_STEP), _optional("latent_meta", Tensors("int32")),
            _optional("response_ids", Jagged("int32")), _optional("response_mask", Jagged("uint8")),
            _optional("response_log_probs", Jagged("float32")), _optional("llm_response_ids", Jagged("int32")),
            _optional("llm_log_probs", Jagged("float32")), *_text("rewritten_prompt", required=False),
        )),
        TableSchema("trajectories_failed", _TRAJECTORY_SCALARS),
        TableSchema("embeddings", (
            *_text("prompt_key", "encoder_digest"),
            Column("prompt_embeds", Jagged()), Column("prompt_embeds_len", pa.int32()),
            _optional("negative_prompt_embeds", Jagged(), True),
            _optional("negative_prompt_embeds_len", pa.int32(), True),
            _optional("prompt_embeds_mask", Jagged("bool"), True),
            _optional("negative_prompt_embeds_mask", Jagged("bool"), True),
            _optional("pooled_prompt_embeds", Tensors(dims=(("width",),))),
            _optional("negative_pooled_prompt_embeds", Tensors(dims=(("width",),))),
            _optional("audio_prompt_embeds", Jagged(), True), _optional("audio_prompt_embeds_len", pa.int32(), True),
            _optional("negative_audio_prompt_embeds", Jagged(), True),
            _optional("negative_audio_prompt_embeds_len", pa.int32(), True),
        )),
        TableSchema("conditions", (
            *_text("prompt_key"), _optional("condition_video_rows", Jagged()),
            _optional("condition_video_row_count", pa.int32()), _optional("condition_audio_rows", Jagged()),
            _optional("condition_audio_row_count", pa.int32()),
            _optional("condition_image_latents", Jagged("float32")),
            _optional("img_shapes", pa.list_(pa.list_(pa.int32())), True),
        )),
        TableSchema("media", (
            *_ID, Column("kind", NAME), _optional("pixels", Tensors("uint8", _PIXELS)),
            _optional("fps", pa.float32(), True), Column("sha256", pa.binary(32)),
        )),
        TableSchema("rewards", _REWARDS),
        TableSchema("scores", _REWARDS),
        TableSchema("reward_summary", (
            *_ID, Column("rm_score", pa.float32(), nullable=True), *_maybe_float("llm_rm_score", "acc"),
            Column("valid", pa.bool_()), _optional("status", NAME),
            *_text("reason", nullable=True, required=False),
        ), minor=1),
        TableSchema("logprobs", (
            *_ID, *_int64("weights_version"), Column("old_log_probs", _PER_STEP),
            _optional("old_prev_sample_mean", Tensors("float32", _STEP_LATENTS)),
        )),
        TableSchema("reference", (
            *_ID, *_text("ref_digest"), _optional("ref_log_prob", _PER_STEP),
            _optional("ref_prev_sample_mean", Tensors("float32", _STEP_LATENTS)),
            _optional("ref_noise_pred", Tensors("float32", _LATENTS)),
            _optional("timesteps", pa.float32()), *_int64("noise_seed", required=False),
        )),
        TableSchema("advantages", (
            *_ID, Column("score", pa.float32()), Column("group_mean", pa.float32()),
            Column("group_std", pa.float32()), *_maybe_float("batch_std"), Column("advantage", pa.float32()),
            *_maybe_float("reward_prob"), *_text("estimator"), _optional("valid", pa.bool_()),
            _optional("is_weights", _PER_STEP),
        )),
        TableSchema("actor_batch", (
            *_int64("position", "sample_index"), Column("epoch", pa.int32()), Column("minibatch", pa.int32()),
            _optional("pair_role", NAME, True), Column("is_padding", pa.bool_()), Column("weight", pa.float32()),
            _optional("noise_seed", pa.int64(), True), _optional("selected_timesteps", pa.list_(pa.int32()), True),
        )),
        TableSchema("updates", (
            *_text("update_id"), *_int64("step"), Column("epoch", pa.int32()), Column("minibatch", pa.int32()),
            Column("kind", NAME), *_int64("version_before", "version_after"), *_text("batch_digest"),
            *_text("weights_digest", nullable=True), *_int64("fence_epoch"), Column("skipped", pa.bool_()),
            *_text("metrics_json"), Column("wall_time", pa.timestamp("us", tz="UTC")),
        )),
        TableSchema("weights", (
            *_int64("version"), Column("kind", NAME), *_text("adapter", nullable=True, required=False),
            Column("files", pa.list_(_WEIGHT_FILE)), *_int64("tensor_count"), *_text("checksum"),
            *_text("peft_config_json", nullable=True, required=False),
            _optional("parent_version", pa.int64(), True),
        )),
        TableSchema("metrics", (
            *_int64("step"), Column("name", NAME), Column("value", pa.float64()),
            _optional("stage", NAME, True), Column("wall_time", pa.timestamp("us", tz="UTC")),
        )),
    )
}  # fmt: skip
