import asyncio
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from tests.unit.agent_loop.fake_client import WINDOW, Client, config, draw
from verl_omni_core import identity
from verl_omni_core.agent_loop.sampling import sampling_from_json, training_sampling, validation_sampling
from verl_omni_core.agent_loop.tables import CONDITIONING_SHA256
from verl_omni_core.batches.tables import read_jagged, read_tensor
from verl_omni_core.errors import ContractError
from verl_omni_core.rewards._contract import Score, ScoringItem
from verl_omni_core.rewards._tables import scores_of
from verl_omni_core.rollout._contract import DiffusionOutput, SampleRequest, SamplingParams
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.workers.reward_worker import RewardWorker
from verl_omni_core.workers.rollout_worker import PackResult, PackTask, RolloutWorker, packs_of

PROMPTS, GROUP = 3, 4


def sampling_json(sampling: SamplingParams) -> str:
    return json.dumps(vars(sampling) | {"window": sampling.window and list(sampling.window)}, sort_keys=True)


def planned(sampling: SamplingParams | None = None) -> tuple[pa.Table, pa.Table]:
    uids = [f"u{i}" for i in range(PROMPTS)]
    count = PROMPTS * GROUP
    prompts = pa.table(
        {
            "uid": uids,
            "prompt_key": [f"k{i}" for i in range(PROMPTS)],
            "prompt": [f'the word "{"W" * (i + 1)}"' for i in range(PROMPTS)],
            "negative_prompt": pa.array([None] * PROMPTS, pa.string()),
            "ground_truth": ["W" * (i + 1) for i in range(PROMPTS)],
        }
    )
    requests = pa.table(
        {
            "sample_index": pa.array(range(count), pa.int64()),
            "sample_id": [identity.sample_id(uid, g) for uid in uids for g in range(GROUP)],
            "uid": [uid for uid in uids for _ in range(GROUP)],
            "session": pa.array([g for _ in uids for g in range(GROUP)], pa.int32()),
            "prompt_key": [f"k{i}" for i in range(PROMPTS) for _ in range(GROUP)],
            "seed": pa.array([identity.sample_seed(1, 1, i) for i in range(count)], pa.int64()),
            "sampling_json": [sampling_json(sampling or training_sampling(config(), 1))] * count,
        }
    )
    return prompts, requests


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    (tmp_path / "run").mkdir()
    return RunStore(tmp_path / "run")


def run_packs(worker: RolloutWorker, packs: list[PackTask]) -> list[PackResult]:
    async def run() -> list[PackResult]:
        return list(await asyncio.gather(*(worker.run_pack(pickle.loads(pickle.dumps(pack))) for pack in packs)))

    return asyncio.run(asyncio.wait_for(run(), 60))


def rollout(
    store: RunStore, client: Any, *, pack_size: int = 5, score: bool = False, sampling: Any = None, **options: Any
) -> tuple[ArtifactRef, list[PackResult]]:
    settings = config()
    attempt = store.attempt(1, "rollout", "key")
    packs = packs_of(*planned(sampling), attempt, pack_size=pack_size, weights_version=0, score=score, **options)
    handles = [RewardWorker(settings.reward)] if score else []
    results = run_packs(RolloutWorker(settings, client, handles), packs)
    files = [file for result in results for file in result.files]
    ref = attempt.commit(files, rows=sum(r.rows for r in results), parents=[], producer={})
    return ref, results


def test_packs_are_consecutive_and_each_prompts_embeddings_have_one_owner(store: RunStore) -> None:
    attempt = store.attempt(1, "rollout", "key")
    packs = packs_of(*planned(), attempt, pack_size=5, weights_version=0, score=False)
    assert [pack.requests["sample_index"].to_pylist() for pack in packs] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert [pack.embedding_keys for pack in packs] == [{"k0", "k1"}, {"k2"}, frozenset()]
    assert [pack.prompts["uid"].to_pylist() for pack in packs] == [["u0", "u1"], ["u1", "u2"], ["u2"]]
    again = packs_of(*planned(), attempt, pack_size=5, weights_version=0, score=False)
    assert [pack.pack for pack in packs] == [pack.pack for pack in again]
    assert len({pack.pack for pack in packs}) == 3


def test_tables_hold_what_was_drawn_in_canonical_order(store: RunStore) -> None:
    client = Client(delay_s=lambda request: 0.001 * (request.seed % 7))
    ref, results = rollout(store, client)
    trajectories = store.table(ref, "trajectories")
    assert trajectories["sample_index"].to_pylist() == list(range(PROMPTS * GROUP))
    requests = sorted(client.requests, key=lambda request: request.seed)
    drawn = [draw(request) for request in requests]
    latents = read_tensor(trajectories, "all_latents")
    assert latents.dtype == torch.float32
    assert torch.equal(latents, torch.stack([sample.extra_fields["all_latents"] for sample in drawn]))
    log_probs = torch.stack([sample.log_probs for sample in drawn])
    assert torch.equal(read_tensor(trajectories, "rollout_log_probs"), log_probs)
    assert read_tensor(trajectories, "step_indices").shape == (PROMPTS * GROUP, WINDOW)
    assert set(trajectories["sde_window_start"].to_pylist()) == {requests[0].sampling.window[0]}
    assert set(trajectories["status"].to_pylist()) == {"ok"}
    assert "latents_clean" not in trajectories.column_names
    pixels = read_tensor(store.table(ref, "media"), "pixels")
    assert torch.equal(pixels, torch.stack([sample.diffusion_output for sample in drawn]))
    assert sum(result.rows for result in results) == PROMPTS * GROUP
    assert all(len(result.metrics) == result.rows for result in results)


def test_embeddings_are_stored_once_a_prompt_bit_for_bit(store: RunStore) -> None:
    client = Client()
    ref, _ = rollout(store, client)
    embeddings = store.table(ref, "embeddings")
    assert sorted(embeddings["prompt_key"].to_pylist()) == ["k0", "k1", "k2"]
    by_prompt = {request.prompt: draw(request).extra_fields for request in client.requests}
    for key, embeds in zip(embeddings["prompt_key"].to_pylist(), read_jagged(embeddings, "prompt_embeds"), strict=True):
        expected = by_prompt[f'the word "{"W" * (int(key[1]) + 1)}"']
        assert torch.equal(embeds, expected["prompt_embeds"])
    trajectories = store.table(ref, "trajectories")
    pairs = set(zip(trajectories["prompt_key"].to_pylist(), trajectories[CONDITIONING_SHA256].to_pylist(), strict=True))
    assert len(pairs) == PROMPTS


def test_samples_are_scored_as_they_come(store: RunStore) -> None:
    ref, _ = rollout(store, Client(), score=True)
    scores = scores_of(store.table(ref, "scores"))
    assert len(scores) == PROMPTS * GROUP
    assert all(set(row) == {"ocr"} and row["ocr"].value is not None for row in scores.values())


def test_a_pack_whose_reward_worker_dies_while_it_scores_is_finished_and_lacks_its_scores(store: RunStore) -> None:
    class Dying(RewardWorker):
        dead = False

        async def score(self, items: Sequence[ScoringItem]) -> list[dict[str, Score]]:
            self.dead = True
            raise ConnectionError("the worker is gone")

        async def versions(self) -> dict[str, str]:
            if self.dead:
                raise ConnectionError("the worker is gone")
            return await super().versions()

    attempt, settings = store.attempt(1, "rollout", "key"), config()
    packs = packs_of(*planned(), attempt, pack_size=6, weights_version=0, score=True)
    results = run_packs(RolloutWorker(settings, Client(), [Dying(settings.reward)]), packs)
    assert [(result.rows, result.error) for result in results] == [(6, None), (6, None)]
    assert sorted(store.finished_shards(1, "rollout", "key")) == [0, 1]
    files = [file for result in results for file in result.files]
    ref = attempt.commit(files, rows=PROMPTS * GROUP, parents=[], producer={})
    scores = [row["ocr"] for row in scores_of(store.table(ref, "scores")).values()]
    assert len(scores) == PROMPTS * GROUP and {score.value for score in scores} == {None}
    assert all("the worker is gone" in str(score.error) for score in scores)


def test_a_failed_sample_is_a_row_with_its_error_in_a_table_of_its_own(store: RunStore) -> None:
    bad = identity.sample_seed(1, 1, 6)
    ref, results = rollout(store, Client(fail=lambda r: ValueError("not drawable") if r.seed == bad else None))
    assert [result.failed for result in results] == [0, 1, 0]
    assert "not drawable" in str(results[1].error)
    failed = store.table(ref, "trajectories_failed").to_pylist()
    assert [(row["sample_index"], row["status"], row["error_class"]) for row in failed] == [(6, "failed", "ValueError")]
    indices = store.table(ref, "trajectories")["sample_index"].to_pylist()
    assert sorted([*indices, 6]) == list(range(PROMPTS * GROUP))


def test_a_pack_of_failures_leaves_only_its_failures(store: RunStore) -> None:
    settings = config(rollout={"max_attempts": 1})
    attempt = store.attempt(1, "rollout", "key")
    packs = packs_of(*planned(), attempt, pack_size=12, weights_version=0, score=False)
    (result,) = run_packs(RolloutWorker(settings, Client(fail=lambda _: ValueError("no"))), packs)
    assert [file.table for file in result.files] == ["trajectories_failed"]
    assert (result.rows, result.failed) == (0, 12)


def test_a_sample_of_another_policy_version_fails(store: RunStore) -> None:
    _, results = rollout(store, Client(version=3))
    assert sum(result.failed for result in results) == PROMPTS * GROUP
    assert "weights version 3, expected 0" in str(results[0].error)


def test_validation_stores_pictures_and_no_latents(store: RunStore) -> None:
    ref, _ = rollout(store, Client(), sampling=validation_sampling(config()), validate=True)
    trajectories = store.table(ref, "trajectories")
    assert not {"all_latents", "latents_clean", "rollout_log_probs"} & set(trajectories.column_names)
    assert store.table(ref, "media").num_rows == PROMPTS * GROUP


def test_embeddings_that_differ_within_a_prompt_are_refused(store: RunStore) -> None:
    class Drifting(Client):
        async def generate(self, request: SampleRequest, route_key: str, *, attempt: int = 0) -> DiffusionOutput:
            output = await super().generate(request, route_key, attempt=attempt)
            output.extra_fields["prompt_embeds"] = torch.randn(
                5, 8, generator=torch.Generator().manual_seed(request.seed)
            )
            return output

    with pytest.raises(ContractError, match="different embeddings"):
        rollout(store, Drifting())


def test_scoring_without_reward_workers_is_refused(store: RunStore) -> None:
    attempt = store.attempt(1, "rollout", "key")
    packs = packs_of(*planned(), attempt, pack_size=12, weights_version=0, score=True)
    with pytest.raises(ContractError, match="no reward workers"):
        run_packs(RolloutWorker(config(), Client()), packs)


def test_sampling_survives_its_json() -> None:
    for sampling in (training_sampling(config(), 3), validation_sampling(config())):
        assert sampling_from_json(sampling_json(sampling)) == sampling
