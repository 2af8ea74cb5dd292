"""Computing in bf16: what draws and what replays round alike, and each setting of a dtype reaches its tensors.

Bounds of ratios are measured: a batch of another size may round its sums otherwise, by up to 6e-4 here.
"""

import pytest
import torch

from tests.unit.training import tiny
from verl_omni_core.training import ranks


@pytest.fixture(autouse=True)
def _schedule_and_group(monkeypatch):
    monkeypatch.setattr(tiny, "STEPS", 7)  # 947.37, the second timestep, is no bf16 number
    yield
    ranks.leave()


def _drawn(pipeline, rank):
    """Trajectories from a network that is held in bf16 as an engine holds it; an adapter stays in fp32."""
    module = None
    if rank:
        made = tiny.engine(pipeline, rank=rank, dtype="bfloat16")
        tiny.stir(made)
        module = made.module
    return tiny.batch(pipeline, module=module, dtype=torch.bfloat16)


@pytest.mark.parametrize("rank", [4, 0])
def test_a_bf16_rollout_replays_to_ratio_1_in_its_own_batch_and_within_2e_3_in_others(pipeline, rank):
    batch = _drawn(pipeline, rank)
    for micro_batch, bound in ((tiny.ROWS, 0.0), (4, 2e-3), (1, 2e-3)):
        made = tiny.engine(pipeline, rank=rank, dtype="bfloat16", micro_batch=micro_batch, deterministic=True)
        if rank:
            tiny.stir(made)
        assert made.forward_backward_batch(batch, tiny.policy_gradient()).ratio_deviation <= bound


@pytest.mark.parametrize("rank", [4, 0])
def test_the_network_embeds_float32_timesteps_while_it_computes_in_bf16(pipeline, rank):
    made = tiny.engine(pipeline, rank=rank, dtype="bfloat16")
    seen = []
    made.module.register_forward_pre_hook(lambda _, args, named: seen.append(named), with_kwargs=True)
    made.module.time_text_embed.time_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    output = []
    made.module.proj_out.register_forward_hook(lambda _, args, result: output.append(result.dtype))
    made.infer_batch(_drawn(pipeline, rank))
    assert seen[0]["timestep"].dtype == seen[1].dtype == torch.float32
    assert 947 < seen[1].min() < 947.5
    assert seen[0]["hidden_states"].dtype == seen[0]["encoder_hidden_states"].dtype == output[0] == torch.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_their_moments_and_what_is_written_have_the_dtype_of_the_setting(pipeline, dtype):
    made = tiny.engine(pipeline, dtype="bfloat16", lora_dtype=dtype, learning_rate=1e-3)
    made.forward_backward_batch(_drawn(pipeline, 4), tiny.policy_gradient())
    made.optimizer_step()
    wanted = getattr(torch, dtype)
    moments = [state[key] for state in made.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    written = [tensor for _, tensor in made.get_per_tensor_param()[0]]
    assert moments and written
    assert {tensor.dtype for tensor in (*made.trainable.values(), *moments, *written)} == {wanted}
    frozen = {p.dtype for n, p in made.module.named_parameters() if "lora_" not in n}
    assert frozen == {torch.bfloat16}
