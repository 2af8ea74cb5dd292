"""Draws packs of samples and writes them, as shard tables, into the attempt of a stage.

A pack is the unit of commit and of retry. The class is plain; as a Ray actor it is an asynchronous one, so that the
samples of several packs are drawn, scored and written at the same time.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from verl_omni_core.agent_loop import tables
from verl_omni_core.agent_loop.loops._contract import LLMClient
from verl_omni_core.agent_loop.outputs import DiffusionAgentLoopOutput, SampleFailure
from verl_omni_core.agent_loop.sampling import sampling_from_json
from verl_omni_core.agent_loop.worker import DiffusionAgentLoopWorker, Result
from verl_omni_core.batches import columns
from verl_omni_core.batches.batch import DataProto
from verl_omni_core.errors import ConfigError, ContractError, FencedError, StageLost, StoreError, VerlOmniError
from verl_omni_core.identity import digest
from verl_omni_core.rewards._tables import score_table
from verl_omni_core.rollout._contract import SamplingParams
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.store.attempt import Attempt
from verl_omni_core.store.manifest import FileRecord

_SCORER_TIMEOUT_S = 60.0
NOT_THE_SAMPLES = (ConfigError, ContractError, StoreError, FencedError)
"""Errors that other samples and other seeds would meet as well: no policy for failed samples applies to them."""


@dataclass(frozen=True)
class PackTask:
    """Samples to draw together, and where to put them. Travels by pickle."""

    pack: str
    """Its id, derived from the samples: equal ids are routed alike where that matters."""
    shard: int
    requests: pa.Table
    """The pack's rows of the ``requests`` table."""
    prompts: pa.Table
    """Rows of the ``prompts`` table, at least those that the requests name by ``uid``."""
    attempt: Attempt
    embedding_keys: frozenset[str]
    """Prompts whose embeddings this pack writes; see :func:`packs_of`."""
    pack_size: int
    """Samples of a full pack, the last pack may have fewer."""
    weights_version: int
    """The policy version that must draw; samples of another one fail."""
    score: bool
    """Score samples as they come."""
    validate: bool = False
    refills: int = 0
    """How often samples that failed for good got other seeds."""
    replaced: pa.Table | None = None
    """Rows of ``trajectories_failed``: what became of the requests whose seeds were replaced."""


@dataclass(frozen=True)
class PackResult:
    """What a pack left behind."""

    pack: str
    shard: int
    files: tuple[FileRecord, ...]
    rows: int
    failed: int
    error: VerlOmniError | None
    """Of the first failed sample, by position; one that no retry helps comes before others."""
    metrics: tuple[Mapping[str, float], ...] = field(repr=False)
    """Timings by sample, for :func:`agent_loop_metrics`."""
    failures: pa.Table | None = field(default=None, repr=False, compare=False)
    """Rows of ``trajectories_failed`` of the samples that failed now; none if none did."""


def packs_of(
    prompts: pa.Table,
    requests: pa.Table,
    attempt: Attempt,
    *,
    pack_size: int,
    weights_version: int,
    score: bool,
    validate: bool = False,
) -> list[PackTask]:
    """Cut the requests of a stage into packs of consecutive samples.

    Packs depend on the sample indices alone, never on workers. Each prompt's embeddings are written by the first pack
    that draws a sample of it, so that their table has every prompt once.
    """
    packs: list[PackTask] = []
    written: set[str] = set()
    prompt_uids = pa.array(prompts.column(columns.UID).combine_chunks())
    for shard, start in enumerate(range(0, requests.num_rows, pack_size)):
        rows = requests.take(list(range(start, min(start + pack_size, requests.num_rows))))
        keys = set(rows.column(columns.PROMPT_KEY).to_pylist())
        uids = dict.fromkeys(rows.column(columns.UID).to_pylist())
        identity = {"stage": attempt.stage, "step": attempt.step, "shard": shard}
        packs.append(
            PackTask(
                pack=digest(identity)[:16],
                shard=shard,
                requests=rows,
                # a taken table holds its own rows only; a slice would travel with all of them
                prompts=prompts.take([prompt_uids.index(uid).as_py() for uid in uids]),
                attempt=attempt,
                embedding_keys=frozenset(keys - written),
                pack_size=pack_size,
                weights_version=weights_version,
                score=score,
                validate=validate,
            )
        )
        written |= keys
    return packs


class RolloutWorker:
    """Draws, scores and stores packs."""

    def __init__(
        self,
        config: RunConfig,
        llm_client: LLMClient,
        reward_loop_worker_handles: Sequence[Any] = (),
    ) -> None:
        """Make a worker.

        Args:
            config: the run's settings.
            llm_client: the router to the replicas.
            reward_loop_worker_handles: reward workers; needed for packs that are scored as they come.
        """
        self._config = config
        self._versions: dict[str, str] | None = None
        self._encoder_digest = digest(
            {
                "model": config.model.name,
                "path": config.model.path,
                "dtype": config.rollout.dtype,
                "max_sequence_length": config.sampler.max_sequence_length,
            }
        )

        self._connect(llm_client, reward_loop_worker_handles)

    async def connect(self, llm_client: LLMClient, reward_loop_worker_handles: Sequence[Any] = ()) -> None:
        """Use another client and other reward workers from the next pack on, as after one of them was rebuilt."""
        self._connect(llm_client, reward_loop_worker_handles)

    def _connect(self, llm_client: LLMClient, reward_loop_worker_handles: Sequence[Any]) -> None:
        self._client = llm_client
        self._reward_workers = list(reward_loop_worker_handles)
        self._unscored = DiffusionAgentLoopWorker(self._config, llm_client)
        self._scored = DiffusionAgentLoopWorker(
            self._config, llm_client, reward_loop_worker_handles=self._reward_workers
        )

    async def ping(self) -> int:
        """Return how many requests the client has finished, failed ones included, if it counts them."""
        return int(getattr(self._client, "finished", 0))

    async def run_pack(self, pack: PackTask) -> PackResult:
        """Draw a pack and write its tables into the attempt.

        Written are ``trajectories``, ``embeddings``, ``media``, with ``score`` also ``scores``, and
        ``trajectories_failed`` for samples that failed for good; each only if it has rows. Rows stand in the order of
        the requests.

        Of a pack with replaced seeds ``trajectories_failed`` also tells why they were. A pack without failures is
        declared a finished shard at once: whatever becomes of the others or of who asked, the next attempt takes it
        over.

        Returns: the files and what the pack says about itself; a failed sample is counted there, not raised.
        Raises: ContractError for requests that are not of one kind, embeddings that differ between samples of a
            prompt, or scoring without reward workers; StoreError from writing.
        """
        if pack.score and not self._reward_workers:
            raise ContractError(f"pack {pack.pack} is to be scored, but the rollout worker has no reward workers")
        if pack.score and self._versions is None:
            # before anything is drawn: whatever becomes of the reward workers then, the pack is finished
            self._versions = await self._scorer_versions()
        batch = _batch_of(pack)
        results = await (self._scored if pack.score else self._unscored).run_samples(batch)
        ids = pack.requests.column(columns.SAMPLE_ID).to_pylist()
        results = [
            _of_version(result, pack.weights_version, sample_id) for result, sample_id in zip(results, ids, strict=True)
        ]
        failures = [result for result in results if isinstance(result, SampleFailure)]
        failed = _failed_rows(pack, results)
        files = await asyncio.to_thread(self._write, pack, batch.meta_info["sampling"], results, failed)
        if not failures:
            files = (await asyncio.to_thread(pack.attempt.finish_shard, pack.shard, files, _refilled(pack))).files
        return PackResult(
            pack=pack.pack,
            shard=pack.shard,
            files=tuple(files),
            rows=len(results) - len(failures),
            failed=len(failures),
            error=_decisive(failures),
            metrics=tuple(vars(r.metrics).copy() for r in results if isinstance(r, DiffusionAgentLoopOutput)),
            failures=failed,
        )

    async def _scorer_versions(self) -> dict[str, str]:
        method = self._reward_workers[0].versions
        return await asyncio.wait_for(_awaited(getattr(method, "remote", method)), _SCORER_TIMEOUT_S)

    def _write(
        self, pack: PackTask, sampling: SamplingParams, results: Sequence[Result], failed: pa.Table | None
    ) -> Sequence[FileRecord]:
        kept = [i for i, result in enumerate(results) if isinstance(result, DiffusionAgentLoopOutput)]
        outputs = [result for result in results if isinstance(result, DiffusionAgentLoopOutput)]
        written: dict[str, pa.Table | None] = {}
        if outputs:
            requests = pack.requests.take(kept)
            written["trajectories"] = tables.trajectories(
                requests, outputs, window=sampling.window, latents=not pack.validate
            )
            written["embeddings"] = tables.embeddings(
                requests, outputs, wanted=pack.embedding_keys, encoder_digest=self._encoder_digest
            )
            written["media"] = tables.media(requests, outputs)
            if pack.score:
                written["scores"] = score_table(
                    "scores",
                    requests.column(columns.SAMPLE_INDEX).to_pylist(),
                    requests.column(columns.SAMPLE_ID).to_pylist(),
                    [output.scores or {} for output in outputs],
                    self._config.reward,
                    self._versions or {},
                )
        told = [table for table in (pack.replaced, failed) if table is not None]
        if told:
            written["trajectories_failed"] = pa.concat_tables(told).unify_dictionaries()
        return [
            pack.attempt.write_table(name, pack.shard, table) for name, table in written.items() if table is not None
        ]


def _failed_rows(pack: PackTask, results: Sequence[Result]) -> pa.Table | None:
    lost = [i for i, result in enumerate(results) if isinstance(result, SampleFailure)]
    failures = [result for result in results if isinstance(result, SampleFailure)]
    return tables.failed(pack.requests.take(lost), failures, version=pack.weights_version) if failures else None


def _refilled(pack: PackTask) -> dict[str, Any]:
    """Return what a finished shard says about replaced seeds; nothing where there are none."""
    if pack.replaced is None:
        return {}
    return {"refills": pack.refills, "refilled": sorted(set(pack.replaced[columns.UID].to_pylist()))}


def _decisive(failures: Sequence[SampleFailure]) -> VerlOmniError | None:
    """Return the error that decides what becomes of the pack, in a class that travels; none without failures.

    What is wrong beyond the sample comes first, then a dead replica, then what no retry helps.
    """
    if not failures:
        return None
    first = min(failures, key=_urgency)
    if isinstance(first.error, VerlOmniError):
        return type(first.error)(f"{first.sample_id}: {first.error}")
    return VerlOmniError(f"{first.sample_id}: {type(first.error).__name__}: {first.error}")


def _urgency(failure: SampleFailure) -> int:
    if isinstance(failure.error, NOT_THE_SAMPLES):
        return 0
    if isinstance(failure.error, StageLost):
        return 1
    return 3 if getattr(failure.error, "retryable", False) else 2


async def _awaited(method: Callable[[], Any]) -> Any:
    return await method()


def _batch_of(pack: PackTask) -> DataProto:
    kinds = set(pack.requests.column(columns.SAMPLING_JSON).to_pylist())
    if len(kinds) != 1:
        raise ContractError(
            f"pack {pack.pack} has {len(kinds)} different sampling parameters, expected one for all its rows"
        )
    prompts = {row[columns.UID]: row for row in pack.prompts.to_pylist()}
    rows = pack.requests.to_pylist()
    missing = sorted({row[columns.UID] for row in rows} - set(prompts))
    if missing:
        raise ContractError(f"pack {pack.pack} lacks the prompts of {missing[:4]}; send every prompt that is drawn")
    taken = [columns.SAMPLE_INDEX, columns.SAMPLE_ID, columns.UID, columns.SESSION, columns.PROMPT_KEY, columns.SEED]
    objects: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in taken}
    own = [prompts[row[columns.UID]] for row in rows]
    objects["raw_prompt"] = [row[columns.PROMPT] for row in own]
    objects["raw_negative_prompt"] = [row.get(columns.NEGATIVE_PROMPT) for row in own]
    for name in (columns.GROUND_TRUTH, columns.DATA_SOURCE, columns.AGENT_NAME):
        objects[name] = [row.get(name) for row in own]
    objects["extra_info"] = [_parsed(row.get(columns.EXTRA_INFO_JSON)) for row in own]
    objects["pack_index"] = list(range(len(rows)))
    meta = {
        "sampling": sampling_from_json(kinds.pop()),
        "validate": pack.validate,
        "pack": pack.pack,
        "pack_size": pack.pack_size,
    }
    return DataProto.from_dict(objects=objects, meta_info=meta)


def _parsed(text: str | None) -> dict[str, Any]:
    return json.loads(text) if text else {}


def _of_version(result: Result, wanted: int, sample_id: str) -> Result:
    if isinstance(result, SampleFailure):
        return result
    seen = result.extra_fields.get("weights_version")
    if seen == wanted:
        return result
    error = ContractError(f"drawn by weights version {seen}, expected {wanted}; sync the replicas before the rollout")
    return SampleFailure(sample_id, error, result.extra_fields.get("attempts", 1))
