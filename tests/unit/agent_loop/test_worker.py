import asyncio
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.agent_loop.fake_client import WINDOW, Client, batch, config, draw
from verl_omni_core import identity
from verl_omni_core.agent_loop.loops._contract import LoopContext
from verl_omni_core.agent_loop.metrics import agent_loop_metrics
from verl_omni_core.agent_loop.outputs import DiffusionAgentLoopOutput, SampleFailure, join_batches
from verl_omni_core.agent_loop.worker import DiffusionAgentLoopWorker
from verl_omni_core.batches.batch import DataProto
from verl_omni_core.errors import ContractError, EngineError, UnknownNameError
from verl_omni_core.rewards._contract import Score, ScoringItem
from verl_omni_core.rollout._contract import PackPosition, SamplingParams


def generate(worker: DiffusionAgentLoopWorker, rows: DataProto) -> DataProto:
    return asyncio.run(asyncio.wait_for(worker.generate_sequences(rows), 30))


class RewardWorker:
    """Scores a sample by its first pixel; negative where a score is missing."""

    def __init__(self, missing: str | None = None, delay_s: float = 0.0) -> None:
        self.missing, self.delay_s, self.items = missing, delay_s, []

    async def score(self, items: list[ScoringItem]) -> list[dict[str, Score]]:
        self.items += items
        await asyncio.sleep(self.delay_s)
        return [
            {"ocr": Score(None, "broke") if item.sample_id == self.missing else Score(0.5, extra={"acc": 1.0})}
            for item in items
        ]

    async def ping(self) -> int:
        return 0


def test_rows_keep_their_order_whoever_is_done_first() -> None:
    client = Client(delay_s=lambda request: 0.05 - 0.005 * int(request.request_id[1:]))
    out = generate(DiffusionAgentLoopWorker(config(), client), batch(8))
    for row, request in enumerate(sorted(client.requests, key=lambda request: int(request.request_id[1:]))):
        assert torch.equal(out.batch["responses"][row], draw(request).diffusion_output)
    assert out.non_tensor_batch["sample_id"].tolist() == [f"s{i}" for i in range(8)]


def test_a_batch_has_the_documented_shapes() -> None:
    worker = DiffusionAgentLoopWorker(
        config(rollout={"prompt_length": 24, "max_prompt_embed_length": 7}),
        Client(),
        tokenizer=lambda text: [ord(letter) for letter in text],
    )
    out = generate(worker, batch(3))
    prompt = 'the word "W0"'
    assert out.batch["prompts"].shape == (3, 24)
    assert out.batch["prompts"][0, : len(prompt)].tolist() == [ord(letter) for letter in prompt]
    assert out.batch["attention_mask"][0].tolist() == [1] * len(prompt) + [0] * (24 - len(prompt))
    assert out.batch["responses"].shape == (3, 3, 16, 16)
    assert out.batch["responses"].dtype == torch.uint8
    assert out.batch["rollout_log_probs"].shape == (3, WINDOW)
    assert out.batch["all_latents"].shape == (3, WINDOW + 1, 2, 4, 4)
    assert out.batch["prompt_embeds"].shape == (3, 7, 8)
    assert out.batch["prompt_embeds_mask"].sum(dim=1).tolist() == [5, 5, 5]
    assert out.batch["pooled_prompt_embeds"].shape == (3, 8)
    assert out.non_tensor_batch["__num_turns__"].tolist() == [2, 2, 2]
    assert out.non_tensor_batch["raw_prompt"][0] == prompt
    assert "rm_scores" not in out.batch.keys()  # noqa: SIM118
    assert "reward_extra_keys" not in out.meta_info


def test_no_more_samples_are_in_flight_than_allowed() -> None:
    client = Client(delay_s=lambda _: 0.01)
    generate(DiffusionAgentLoopWorker(config(rollout={"max_concurrency": 3}), client), batch(12))
    assert client.most == 3


def test_seeds_depend_on_run_step_and_position_and_on_no_split_among_workers() -> None:
    whole = Client()
    generate(DiffusionAgentLoopWorker(config(run={"seed": 7}), whole), batch(6, meta={"global_steps": 5}))
    parts = Client()
    rows = batch(6, meta={"global_steps": 5})
    for chunk in ([4, 5], [0], [1, 2, 3]):
        generate(DiffusionAgentLoopWorker(config(run={"seed": 7}), parts), rows.select_rows(chunk))
    expected = {f"s{i}": identity.sample_seed(7, 5, i) for i in range(6)}
    assert {request.request_id: request.seed for request in whole.requests} == expected
    assert {request.request_id: request.seed for request in parts.requests} == expected


def test_a_rows_own_seed_wins() -> None:
    client = Client()
    generate(DiffusionAgentLoopWorker(config(), client), batch(2, seed=[11, 12]))
    assert [request.seed for request in client.requests] == [11, 12]


def test_training_shares_one_stochastic_window_with_log_probs() -> None:
    client = Client()
    generate(DiffusionAgentLoopWorker(config(), client), batch(4))
    windows = {request.sampling.window for request in client.requests}
    assert len(windows) == 1
    (window,) = windows
    assert window[1] - window[0] == WINDOW
    assert all(request.sampling.logprobs for request in client.requests)


def test_validation_overrides_steps_noise_log_probs_and_seeds() -> None:
    settings = config(
        sampler={
            "height": 16,
            "width": 16,
            "num_inference_steps": 4,
            "guidance_scale": 2.0,
            "validation": {"num_inference_steps": 9, "seed": 100, "guidance_scale": 3.0},
        }
    )
    client = Client()
    out = generate(DiffusionAgentLoopWorker(settings, client), batch(4, meta={"global_steps": 3, "validate": True}))
    sampling = client.requests[0].sampling
    assert (sampling.num_inference_steps, sampling.guidance_scale, sampling.window) == (9, 3.0, None)
    assert (sampling.noise_level, sampling.logprobs) == (0.0, False)
    assert [request.seed for request in client.requests] == [100, 101, 100, 101]
    assert "rollout_log_probs" not in out.batch.keys()  # noqa: SIM118


def test_packs_have_places_and_one_route_in_deterministic_mode_only() -> None:
    meta = {"global_steps": 1, "pack": "abc", "pack_size": 4}
    fixed, free = Client(), Client()
    generate(DiffusionAgentLoopWorker(config(run={"deterministic": True}), fixed), batch(3, meta=meta))
    generate(DiffusionAgentLoopWorker(config(), free), batch(3, meta={"global_steps": 1}))
    assert [request.pack for request in fixed.requests] == [PackPosition(i, 4, "abc", 3) for i in range(3)]
    assert set(fixed.route_keys) == {"abc"}
    assert [request.pack for request in free.requests] == [None] * 3
    assert free.route_keys == ["s0", "s1", "s2"]


def test_negative_prompts_reach_the_engine() -> None:
    client = Client()
    generate(DiffusionAgentLoopWorker(config(), client), batch(2, negative_prompt=["blurry", None]))
    assert [request.negative_prompt for request in client.requests] == ["blurry", None]


def test_a_transient_failure_is_drawn_again_with_the_same_seed() -> None:
    client = Client(fail=lambda request: EngineError("lost") if request.request_id == "s1" else None)
    out = generate(DiffusionAgentLoopWorker(config(), client), batch(2))
    assert [(request.request_id, request.seed) for request in client.requests[1:]] == [
        ("s1", identity.sample_seed(42, 1, 1)),
        ("s1-retry1", identity.sample_seed(42, 1, 1)),
    ]
    assert client.attempts == [0, 0, 1]
    assert out.non_tensor_batch["attempts"].tolist() == [1, 2]


def test_a_failed_sample_is_a_row_with_its_error_and_stops_no_other() -> None:
    client = Client(fail=lambda request: ValueError("bad prompt") if request.seed == 8 else None)
    worker = DiffusionAgentLoopWorker(config(), client)
    rows = batch(3, seed=[7, 8, 9])
    results = asyncio.run(worker.run_samples(rows))
    assert [type(result) for result in results] == [DiffusionAgentLoopOutput, SampleFailure, DiffusionAgentLoopOutput]
    assert results[1].sample_id == "s1"
    assert results[1].attempts == 1
    assert "bad prompt" in str(results[1].error)
    with pytest.raises(EngineError, match=r"1 of 3 samples failed: s1; .* ValueError: bad prompt"):
        generate(worker, rows)


def test_attempts_end() -> None:
    client = Client(fail=lambda _: EngineError("lost"))
    (result,) = asyncio.run(DiffusionAgentLoopWorker(config(rollout={"max_attempts": 2}), client).run_samples(batch(1)))
    assert isinstance(result, SampleFailure)
    assert result.attempts == len(client.requests) == 2


def test_samples_are_scored_while_others_are_drawn() -> None:
    drawn: list[int] = []
    client = Client(delay_s=lambda request: 0.0 if request.request_id == "s0" else 0.3)

    class Watching(RewardWorker):
        async def score(self, items: list[ScoringItem]) -> list[dict[str, Score]]:
            drawn.append(client.running)
            return await super().score(items)

    generate(DiffusionAgentLoopWorker(config(), client, reward_loop_worker_handles=[Watching()]), batch(4))
    assert drawn[0] == 3


def test_scores_and_extras_come_with_the_batch_when_all_samples_have_them() -> None:
    rewards = RewardWorker()
    worker = DiffusionAgentLoopWorker(config(), Client(), None, [rewards])
    out = generate(
        worker, batch(2, ground_truth=["W0", "W0"], data_source=["glyph"] * 2, extra_info=[{"index": 3}, None])
    )
    assert out.batch["rm_scores"].tolist() == [[0.5], [0.5]]
    assert out.meta_info["reward_extra_keys"] == ["reward/combined", "reward/ocr", "reward/ocr/acc"]
    assert out.non_tensor_batch["reward/ocr/acc"].tolist() == [1.0, 1.0]
    item = next(item for item in rewards.items if item.sample_id == "s0")
    assert (item.prompt, item.ground_truth, item.data_source) == ('the word "W0"', "W0", "glyph")
    assert item.extra_info == {"index": 3, "num_turns": 2}
    assert item.image.dtype == np.uint8
    assert item.image.shape == (3, 16, 16)


def test_one_missing_score_leaves_the_batch_without_rewards() -> None:
    worker = DiffusionAgentLoopWorker(config(), Client(), None, [RewardWorker(missing="s1")])
    out = generate(worker, batch(2))
    assert "rm_scores" not in out.batch.keys()  # noqa: SIM118
    assert "reward_extra_keys" not in out.meta_info


def test_outputs_of_several_workers_concatenate_without_knowledge_of_the_model() -> None:
    rows = batch(6)
    handles = [RewardWorker()]
    whole = generate(DiffusionAgentLoopWorker(config(), Client(), None, handles), rows)
    parts = [
        generate(DiffusionAgentLoopWorker(config(), Client(), None, handles), rows.select_rows(chunk))
        for chunk in ([0, 1], [2], [3, 4, 5])
    ]
    joined = join_batches(parts)
    assert set(joined.batch.keys()) == set(whole.batch.keys())
    for name in whole.batch.keys():  # noqa: SIM118
        assert torch.equal(joined.batch[name], whole.batch[name]), name
    assert joined.meta_info["reward_extra_keys"] == whole.meta_info["reward_extra_keys"]
    assert len(joined.meta_info["metrics"]) == 6


def test_joining_keeps_rewards_only_if_every_part_has_them() -> None:
    rows = batch(4)
    parts = [
        generate(DiffusionAgentLoopWorker(config(), Client(), None, [RewardWorker(missing="s3")]), rows.select_rows(c))
        for c in ([0, 1], [2, 3])
    ]
    joined = join_batches(parts)
    assert len(joined) == 4
    assert "rm_scores" not in joined.batch.keys()  # noqa: SIM118


def test_timings_reduce_to_min_max_mean_and_the_slowest_sample() -> None:
    rows = [
        {"generate_sequences": 1.0, "tool_calls": 0.0, "compute_score": 3.0, "num_preempted": -1},
        {"generate_sequences": 2.0, "tool_calls": 0.0, "compute_score": 1.0, "num_preempted": 2},
    ]
    found = agent_loop_metrics(rows)
    assert found["agent_loop/generate_sequences/min"] == 1.0
    assert found["agent_loop/generate_sequences/mean"] == 1.5
    assert found["agent_loop/compute_score/max"] == 3.0
    assert found["agent_loop/num_preempted/mean"] == 2.0
    assert found["agent_loop/slowest/compute_score"] == 3.0
    assert agent_loop_metrics([]) == {}


def test_an_unknown_agent_loop_is_refused_before_anything_is_drawn() -> None:
    client = Client()
    with pytest.raises(UnknownNameError, match="diffusion_single_turn_agent"):
        generate(DiffusionAgentLoopWorker(config(), client), batch(2, agent_name=["diffusion_single_turn", None]))
    assert client.requests == []


def test_a_loop_from_outside_the_tree_is_built_once_and_runs_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    class TwiceLoop:
        built = 0

        def __init__(self, context: LoopContext) -> None:
            TwiceLoop.built += 1
            self.client = context.llm_client

        async def run(self, sampling_params: SamplingParams, **row: Any) -> DiffusionAgentLoopOutput:
            output = draw_request(sampling_params, row)
            await self.client.generate(output, row["route_key"])
            second = await self.client.generate(output, row["route_key"])
            return DiffusionAgentLoopOutput(
                prompt_ids=[1], response_diffusion_output=second.diffusion_output, num_turns=4, extra_fields={}
            )

    def draw_request(sampling: SamplingParams, row: dict[str, Any]) -> Any:
        from verl_omni_core.rollout._contract import SampleRequest

        return SampleRequest(row["request_id"], "p", None, row["seed"], sampling)

    module = types.ModuleType("my_loops")
    module.TwiceLoop = TwiceLoop
    monkeypatch.setitem(sys.modules, "my_loops", module)
    client = Client()
    out = generate(DiffusionAgentLoopWorker(config(), client), batch(3, agent_name=["my_loops:TwiceLoop"] * 3))
    assert TwiceLoop.built == 1
    assert len(client.requests) == 6
    assert out.non_tensor_batch["__num_turns__"].tolist() == [4, 4, 4]


@pytest.mark.parametrize("missing", ["sample_index", "raw_prompt"])
def test_rows_without_identity_or_prompt_are_refused(missing: str) -> None:
    rows = batch(2)
    del rows.non_tensor_batch[missing]
    with pytest.raises(ContractError, match=r"sample_index|raw_prompt"):
        generate(DiffusionAgentLoopWorker(config(), Client()), rows)


def test_a_prompt_longer_than_the_batch_takes_is_refused_not_cut() -> None:
    worker = DiffusionAgentLoopWorker(
        config(rollout={"prompt_length": 4}), Client(), tokenizer=lambda t: list(t.encode())
    )
    with pytest.raises(ContractError, match=r"rollout\.prompt_length"):
        generate(worker, batch(1))


def test_one_worker_serves_several_event_loops() -> None:
    worker = DiffusionAgentLoopWorker(config(rollout={"max_concurrency": 1}), Client())
    first, second = generate(worker, batch(3)), generate(worker, batch(3))
    assert torch.equal(first.batch["responses"], second.batch["responses"])
