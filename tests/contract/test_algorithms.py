"""Every discovered algorithm that replays stored steps keeps the promises of its kind."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_omni_core import registry
from verl_omni_core.algorithms._contract import Current
from verl_omni_core.errors import ContractError
from verl_omni_core.metrics.names import metric_of
from verl_omni_core.settings.algorithm import AlgorithmSettings

NAMES = registry.names("algorithm")
REPLAYED = [name for name in NAMES if registry.component("algorithm", name).EVALUATION == "replay"]
ROWS, SHAPE = 6, (2, 3)
SHARED = set(AlgorithmSettings.model_fields)


def options(name: str) -> Any:
    """The defaults, with the divergence on where the algorithm has one, so that every term is exercised."""
    known = {field.name for field in dataclasses.fields(registry.component("algorithm", name).Options)}
    return registry.options("algorithm", name, {"kl_coef": 0.1} if "kl_coef" in known else {})


def current(seed: int = 0) -> Current:
    generator = torch.Generator().manual_seed(seed)
    return Current(
        log_probs=(torch.randn(ROWS, generator=generator) * 1e-4 - 1).requires_grad_(),
        prev_sample_mean=torch.randn(ROWS, *SHAPE, generator=generator).requires_grad_(),
        std=torch.linspace(0.2, 0.4, ROWS),
        std_dev_t=torch.linspace(0.6, 0.9, ROWS),
        sqrt_dt=torch.linspace(0.2, 0.4, ROWS),
        velocity=torch.randn(ROWS, *SHAPE, generator=generator).requires_grad_(),
    )


def batch(seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = {name: torch.randn(ROWS, generator=generator) * 1e-4 - 1 for name in ("old_log_probs", "rollout_log_probs")}
    latents = {
        f"{policy}_prev_sample_mean": torch.randn(ROWS, *SHAPE, generator=generator)
        for policy in ("ref", "old", "teacher")
    }
    return {**rows, **latents, "advantages": torch.randn(ROWS, generator=generator)}


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_declares_its_surface(name: str) -> None:
    algorithm = registry.component("algorithm", name)
    assert algorithm.EVALUATION in ("replay", "noised", "paired")
    assert algorithm.Options.__dataclass_params__.frozen
    needed = algorithm.requires(options(name))
    assert set(algorithm.REQUIRES) <= set(needed)
    for field in dataclasses.fields(algorithm.Options):
        assert field.metadata["description"].endswith(".")
    assert "Source" in algorithm.__doc__


@pytest.mark.parametrize("name", REPLAYED)
def test_the_loss_is_one_number_a_row_and_its_metrics_are_rows_of_known_names(name: str) -> None:
    output = registry.component("algorithm", name).loss(current(), batch(), options(name))
    assert output.loss.shape == (ROWS,)
    assert output.loss.dtype == torch.float32
    for metric, values in output.metrics.items():
        assert metric_of(metric) is not None, f"{metric} is not in metrics/names.py"
        assert values.shape == (ROWS,)
        assert not values.requires_grad


@pytest.mark.parametrize("name", REPLAYED)
def test_a_row_loses_the_same_in_any_micro_batch(name: str) -> None:
    """So any cut into micro-batches and ranks has one gradient, unequal cuts too."""
    algorithm, chosen, whole = registry.component("algorithm", name), options(name), current()
    rows = batch()
    together = algorithm.loss(whole, rows, chosen).loss
    gradient = torch.autograd.grad(together.mean(), whole.prev_sample_mean, allow_unused=True)[0]
    pieces, parts = [], []
    for cut in (slice(0, 1), slice(1, 5), slice(5, 6)):
        part = Current(**{f.name: getattr(whole, f.name)[cut] for f in dataclasses.fields(Current)})
        piece = algorithm.loss(part, {key: value[cut] for key, value in rows.items()}, chosen).loss
        pieces.append(piece.detach())
        parts.append(torch.autograd.grad(piece.sum() / ROWS, whole.prev_sample_mean, allow_unused=True)[0])
    assert torch.equal(torch.cat(pieces), together.detach())
    if gradient is not None:
        torch.testing.assert_close(sum(parts), gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", REPLAYED)
def test_what_is_missing_is_named_before_anything_is_computed(name: str) -> None:
    algorithm, chosen = registry.component("algorithm", name), options(name)
    for needed in algorithm.requires(chosen):
        rows = batch()
        del rows[needed]
        with pytest.raises(ContractError, match=needed):
            algorithm.loss(current(), rows, chosen)


@pytest.mark.parametrize("name", REPLAYED)
def test_nothing_in_the_batch_gets_a_gradient(name: str) -> None:
    rows = {key: value.requires_grad_() for key, value in batch().items()}
    registry.component("algorithm", name).loss(current(), rows, options(name)).loss.sum().backward()
    assert all(value.grad is None for value in rows.values())


@pytest.mark.parametrize("name", REPLAYED)
def test_advantages_are_fp32_finite_and_zero_where_a_reward_is_missing(name: str) -> None:
    rewards = torch.tensor([1.0, float("nan"), 0.0, 3.0, 5.0, 2.0])
    found = registry.component("algorithm", name).advantages(
        rewards, torch.tensor([0, 0, 0, 7, 7, 7]), rewards.isfinite(), options(name)
    )
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    assert found[1] == 0
