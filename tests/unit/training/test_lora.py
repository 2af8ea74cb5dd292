"""Adapters: which modules get one, warm start, copies by name, and what is active after an error."""

import pytest
import torch

from tests.unit.training import tiny
from verl_omni_core.errors import ConfigError, ContractError
from verl_omni_core.training import lora
from verl_omni_core.training.export import export_adapter


def _export(made, folder):
    named, config = made.get_per_tensor_param()
    export_adapter(folder, dict(named), config)
    return str(folder)


def _fail_inside(context, made):
    with context:
        assert {n for n, p in made.module.named_parameters() if p.requires_grad} == set(made.trainable)
        raise RuntimeError


def _active(made):
    layers = [m for m in made.module.modules() if hasattr(m, "lora_A")]
    trainable = {name for name, p in made.module.named_parameters() if p.requires_grad}
    expected = {n for n, _ in made.module.named_parameters() if ".lora_" in n and ".default." in n}
    return (
        all(layer.active_adapters == ["default"] and not layer.disable_adapters for layer in layers)
        and trainable == expected
    )


def test_a_new_adapter_changes_nothing_and_draws_a_from_the_seed(pipeline, batch):
    one, two = tiny.engine(pipeline), tiny.engine(pipeline)
    assert all(torch.equal(t, tiny.parameters(two)[n]) for n, t in tiny.parameters(one).items())
    assert torch.equal(one.infer_batch(batch)["log_probs"], one.infer_batch(batch, "reference")["log_probs"])


@pytest.mark.parametrize(
    "settings,key",
    [
        ({"targets": ["attn.to_z"]}, "targets"),
        ({"exclude": ["nothing"]}, "exclude"),
        ({"exclude": ["to_q"]}, "leaves no"),
    ],
)
def test_patterns_that_match_nothing_are_refused(pipeline, settings, key):
    with pytest.raises(ConfigError, match=key):
        tiny.engine(pipeline, **{"targets": ["attn.to_q"], **settings})


def test_excluded_modules_get_no_adapter(pipeline):
    made = tiny.engine(pipeline, targets=["attn.to_q", "attn.to_k"], exclude=["transformer_blocks.0.attn.to_k"])
    modules = {name.split(".lora_")[0] for name in tiny.parameters(made)}
    assert modules == {f"transformer_blocks.{i}.attn.to_{x}" for i, x in ((0, "q"), (1, "q"), (1, "k"))}


def test_errors_inside_a_context_leave_the_policy_active(pipeline):
    made = tiny.engine(pipeline, extra_adapters=("old",))
    contexts = [lambda n=name: made.use_adapter(n) for name in ("old", "reference")] + [made.disable_adapter]
    for context in contexts:
        with pytest.raises(RuntimeError):
            _fail_inside(context(), made)
        assert _active(made)
    with pytest.raises(ContractError, match="no adapter 'older'"), made.use_adapter("older"):
        pass
    assert _active(made)


def test_contexts_choose_the_network(pipeline, batch):
    made = tiny.engine(pipeline, extra_adapters=("old",))
    tiny.stir(made)
    policy, old, base = (made.infer_batch(batch, n)["log_probs"] for n in ("policy", "old", "reference"))
    assert torch.equal(old, base) and not torch.equal(policy, base)
    made.copy_adapter("default", "old")
    assert torch.equal(made.infer_batch(batch, "old")["log_probs"], policy)


def test_average_of_adapters_is_the_weighted_sum(pipeline):
    made = tiny.engine(pipeline, extra_adapters=("old",))
    old = {name: p.detach().clone() for name, p in lora.adapter_parameters(made.module, "old").items()}
    tiny.stir(made, scale=1.0)
    made.ema_update_adapter("default", "old", 0.75)
    policy = tiny.parameters(made)
    for name, parameter in lora.adapter_parameters(made.module, "old").items():
        assert torch.allclose(parameter, 0.75 * old[name] + 0.25 * policy[name])
    made.ema_update_adapter("default", "old", 0.0)
    assert all(torch.equal(p, policy[n]) for n, p in lora.adapter_parameters(made.module, "old").items())
    with pytest.raises(ValueError, match="decay is 1.5"):
        made.ema_update_adapter("default", "old", 1.5)


def test_extra_adapters_get_no_gradient_and_no_optimizer_state(pipeline, batch):
    made = tiny.engine(pipeline, extra_adapters=("old",))
    made.forward_backward_batch(batch, tiny.policy_gradient())
    made.optimizer_step()
    held = {id(p) for group in made.optimizer.param_groups for p in group["params"]}
    assert all(p.grad is None and id(p) not in held for p in lora.adapter_parameters(made.module, "old").values())


def test_warm_start_continues_an_exported_adapter(pipeline, batch, tmp_path):
    made = tiny.engine(pipeline)
    tiny.stir(made)
    folder = _export(made, tmp_path / "adapter")
    warm = tiny.engine(pipeline, warm=folder, extra_adapters=("old",))
    assert torch.equal(warm.infer_batch(batch)["log_probs"], made.infer_batch(batch)["log_probs"])
    assert torch.equal(warm.infer_batch(batch, "old")["log_probs"], made.infer_batch(batch)["log_probs"])
    # the reference stays the base
    base = tiny.engine(pipeline).infer_batch(batch)["log_probs"]
    assert torch.equal(warm.infer_batch(batch, "reference")["log_probs"], base)


def test_a_warm_start_that_does_not_fit_is_refused(pipeline, tmp_path):
    folder = _export(tiny.engine(pipeline), tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"model.lora.rank is 2.*r = 4"):
        tiny.engine(pipeline, rank=2, warm=folder)
    with pytest.raises(ConfigError, match="does not fit"):
        tiny.engine(pipeline, warm=folder, targets=["attn.to_q"])
    with pytest.raises(ConfigError, match="does not exist"):
        tiny.engine(pipeline, warm=str(tmp_path / "none"))


def test_without_adapters_there_is_nothing_to_disable(pipeline):
    made = tiny.engine(pipeline, rank=0)
    with pytest.raises(ContractError, match="frozen copy"), made.disable_adapter():
        pass
