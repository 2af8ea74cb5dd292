"""A pack through a real engine and a real scorer into real tables."""

import asyncio
import json
from pathlib import Path

import pytest
import torch

from tests.unit.agent_loop.fake_client import config
from tests.workers.test_rollout_worker import GROUP, PROMPTS, planned
from verl_omni_core.agent_loop.sampling import training_sampling
from verl_omni_core.batches.batch import DataProto
from verl_omni_core.batches.tables import read_jagged, read_tensor
from verl_omni_core.models import sd3
from verl_omni_core.rollout import diffusers
from verl_omni_core.rollout._contract import DiffusionOutput, EngineOptions, SampleRequest
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.workers.reward_worker import RewardWorker
from verl_omni_core.workers.rollout_worker import RolloutWorker, packs_of

SETTINGS = config(
    sampler={"height": 32, "width": 32, "num_inference_steps": 4, "grid": "uniform", "sde_window_size": 2}
)


class OneEngine:
    """An engine in this process as a pool of one."""

    def __init__(self, engine: diffusers.DiffusersEngine) -> None:
        self.engine = engine

    async def generate(self, request: SampleRequest, route_key: str, *, attempt: int = 0) -> DiffusionOutput:
        return await self.engine.generate(request)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("sd3")
    sd3.build(None).build_tiny(str(folder), 0)
    return str(folder)


def rollout(pipeline: str, store: RunStore, pack_size: int) -> ArtifactRef:
    async def run() -> ArtifactRef:
        options = EngineOptions("sd3", pipeline, "float32", 4, 20.0, 1, 1, 0, False, 60.0, 60.0)
        engine = await diffusers.build(options)
        try:
            worker = RolloutWorker(SETTINGS, OneEngine(engine), [RewardWorker(SETTINGS.reward)])
            attempt = store.attempt(1, "rollout", f"key-{pack_size}")
            prompts, requests = planned(training_sampling(SETTINGS, 1))
            packs = packs_of(prompts, requests, attempt, pack_size=pack_size, weights_version=0, score=True)
            results = await asyncio.gather(*(worker.run_pack(pack) for pack in packs))
            assert [result.error for result in results] == [None] * len(packs)
            files = [file for result in results for file in result.files]
            return attempt.commit(files, rows=PROMPTS * GROUP, parents=[], producer={})
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), 120))


def test_what_the_engine_draws_is_what_the_tables_hold_however_it_is_packed(pipeline: str, tmp_path: Path) -> None:
    stores = []
    for pack_size in (5, 12):
        root = tmp_path / f"run-{pack_size}"
        root.mkdir()
        stores.append(RunStore(root))
    refs = [rollout(pipeline, store, pack_size) for store, pack_size in zip(stores, (5, 12), strict=True)]
    tables = [store.table(ref, "trajectories") for store, ref in zip(stores, refs, strict=True)]
    count = PROMPTS * GROUP
    latents = [read_tensor(table, "all_latents") for table in tables]
    assert latents[0].shape[:2] == (count, 3)
    # single rows differ from batched ones by rounding
    torch.testing.assert_close(latents[0], latents[1], rtol=0, atol=1e-5)
    assert tables[0]["seed"].to_pylist() == tables[1]["seed"].to_pylist()
    assert len(set(tables[0]["seed"].to_pylist())) == count
    assert read_tensor(tables[0], "rollout_log_probs").isfinite().all()
    scores = [store.table(ref, "scores") for store, ref in zip(stores, refs, strict=True)]
    assert scores[0]["sample_index"].to_pylist() == list(range(count))
    assert set(scores[0]["status"].to_pylist()) == {"ok"}
    assert json.loads(scores[0]["extra_json"][0].as_py())["acc"] in (0.0, 1.0)
    embeddings = stores[0].table(refs[0], "embeddings")
    assert len(set(embeddings["prompt_key"].to_pylist())) == embeddings.num_rows == PROMPTS
    lengths = {len(embeds) for embeds in read_jagged(embeddings, "prompt_embeds")}
    assert lengths == {77 + SETTINGS.sampler.max_sequence_length}
    batch = DataProto.from_arrow(tables[0], embeddings)
    assert len(batch) == count
    assert "pooled_prompt_embeds" in batch.batch.keys()  # noqa: SIM118
