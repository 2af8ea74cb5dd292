"""One gradient, however the rows are cut: the mean over all (row, step) of the mini-batch."""

import pytest
import torch

from tests.unit.training import tiny
from verl_omni_core.errors import ContractError
from verl_omni_core.metrics.rl import rollout_correction_metrics


def _gradient(made, batch, loss_fn=None):
    made.optimizer_zero_grad()
    result = made.forward_backward_batch(batch, loss_fn or tiny.policy_gradient())
    return tiny.gradients(made), result


@pytest.mark.parametrize("rank", [4, 0])
def test_every_micro_batch_size_gives_the_same_gradient(pipeline, batch, rank):
    made = tiny.engine(pipeline, rank=rank, micro_batch=20)
    if rank:
        tiny.stir(made)
    expected, whole = _gradient(made, batch)
    for micro_batch in (1, 3, 4, 7, 16):
        made.training = made.training.model_copy(update={"micro_batch": micro_batch})
        found, result = _gradient(made, batch)
        assert tiny.relative(found, expected) < 1e-5
        assert tiny.per_tensor(found, expected) < 5e-5
        assert result.metrics.result()["actor/loss"] == pytest.approx(whole.metrics.result()["actor/loss"], rel=1e-6)


def test_gradient_is_that_of_the_mean_over_rows_and_steps(pipeline, batch):
    made = tiny.engine(pipeline, micro_batch=6)
    tiny.stir(made)
    found, _ = _gradient(made, batch)
    made.optimizer_zero_grad()
    pairs = [(row, step) for row in range(tiny.ROWS) for step in range(2)]
    current = made.prepare_model_outputs(made.prepare_model_inputs(batch, pairs))
    sample, step = torch.tensor(pairs).T
    old = batch["rows"]["steps"]["old_log_probs"][sample, step]
    (-(batch["rows"]["advantages"][sample]) * torch.exp(current.log_probs - old)).mean().backward()
    assert tiny.relative(found, tiny.gradients(made)) < 1e-5


def test_rows_of_weight_zero_change_nothing(pipeline, batch):
    made = tiny.engine(pipeline, micro_batch=4)
    tiny.stir(made)
    expected, result = _gradient(made, tiny.take(batch, [0, 1, 2, 5, 6]))
    masked = tiny.take(batch, list(range(tiny.ROWS)))
    masked["rows"]["weight"] = torch.tensor([1.0, 1, 1, 0, 0, 1, 1, 0, 0, 0])
    found, masked_result = _gradient(made, masked)
    assert tiny.relative(found, expected) < 1e-5
    assert masked_result.pairs == result.pairs == 10
    assert masked_result.metrics.result()["actor/ratio_mean"] == pytest.approx(
        result.metrics.result()["actor/ratio_mean"]
    )


def test_a_mini_batch_without_weight_computes_nothing(pipeline, batch):
    made = tiny.engine(pipeline)
    empty = tiny.take(batch, [])
    result = made.forward_backward_batch(empty, tiny.policy_gradient())
    assert result.pairs == 0 and not tiny.gradients(made)


def test_order_of_rows_does_not_matter(pipeline, batch):
    made = tiny.engine(pipeline, micro_batch=3)
    tiny.stir(made)
    expected, _ = _gradient(made, batch)
    found, _ = _gradient(made, tiny.take(batch, [7, 2, 9, 0, 1, 3, 8, 5, 4, 6]))
    assert tiny.relative(found, expected) < 1e-5


@pytest.mark.parametrize("guided", [False, True])
def test_ratio_is_exactly_one_when_the_rows_form_the_rollouts_batch(pipeline, guided):
    batch = tiny.batch(pipeline, guided=guided)
    made = tiny.engine(pipeline, micro_batch=tiny.ROWS, deterministic=True)
    made.set_denoising(tiny.denoising(pipeline, 2.0 if guided else 1.0))
    _, result = _gradient(made, batch)
    assert result.ratio_deviation == 0.0


def test_ratio_is_one_to_rounding_in_any_batch(pipeline, batch):
    made = tiny.engine(pipeline, micro_batch=3)
    _, result = _gradient(made, batch)
    assert 0 <= result.ratio_deviation < 1e-5


def test_a_perturbed_weight_shows_in_the_ratio(pipeline, batch):
    made = tiny.engine(pipeline)
    with torch.no_grad():
        made.module.proj_out.weight.add_(1e-3)
    _, result = _gradient(made, batch)
    assert result.ratio_deviation > 1e-5


@pytest.mark.parametrize("micro_batch", [3, 20])
def test_in_bypass_the_policy_is_compared_with_the_engine_without_a_change_to_the_gradient(
    pipeline, batch, micro_batch
):
    made = tiny.engine(pipeline, micro_batch=micro_batch)
    tiny.stir(made)
    expected, plain = _gradient(made, batch)
    found, result = _gradient(made, batch, tiny.policy_gradient(bypass=True))
    assert tiny.relative(found, expected) == 0
    current = made.infer_batch(batch)["log_probs"].reshape(-1, 1)
    drawn = batch["rows"]["steps"]["rollout_log_probs"].reshape(-1, 1)
    diagnostics = {f"actor/{k}": v for k, v in rollout_correction_metrics(current, drawn).items()}
    metrics = result.metrics.result()
    assert {name: metrics[name] for name in diagnostics} == pytest.approx(diagnostics, rel=1e-3, abs=1e-6)
    assert metrics.keys() - plain.metrics.result().keys() == diagnostics.keys()


def test_divergence_from_the_reference_has_a_gradient(pipeline, batch):
    made = tiny.engine(pipeline)
    tiny.stir(made)
    reference = made.infer_batch(batch, "reference", means=True)
    with_reference = tiny.take(batch, list(range(tiny.ROWS)))
    with_reference["rows"]["steps"]["ref_prev_sample_mean"] = reference["prev_sample_mean"]
    with_reference["rows"]["advantages"] = torch.zeros(tiny.ROWS)
    found, result = _gradient(made, with_reference, tiny.policy_gradient(tiny.SimpleNamespace(kl_coef=1.0)))
    assert result.metrics.result()["actor/kl_loss"] > 0
    assert max(g.abs().max() for g in found.values()) > 0


def test_a_frozen_copy_is_the_reference_when_all_parameters_train(pipeline, batch):
    made = tiny.engine(pipeline, rank=0, reference=True, optimizer="sgd", learning_rate=0.1)
    before = made.infer_batch(batch, means=True)
    _gradient(made, batch)
    made.optimizer_step()
    after, reference = made.infer_batch(batch, means=True), made.infer_batch(batch, "reference", means=True)
    assert torch.equal(reference["prev_sample_mean"], before["prev_sample_mean"])
    assert not torch.equal(after["prev_sample_mean"], before["prev_sample_mean"])


def test_timesteps_of_another_grid_are_refused(pipeline, batch):
    made = tiny.engine(pipeline)
    other = tiny.take(batch, [0, 1])
    other["rows"]["steps"]["all_timesteps"] = other["rows"]["steps"]["all_timesteps"] + 0.5
    with pytest.raises(ContractError, match="timesteps differ"):
        made.forward_backward_batch(other, tiny.policy_gradient())
