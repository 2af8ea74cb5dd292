"""Golden vectors: reading a group, comparing at its tolerance, and counting that every case is used or named."""

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from verl_omni_core import registry
from verl_omni_core.algorithms._contract import Current, LossOutput

FOLDER = Path(__file__).parents[1] / "golden" / "algorithms"


@dataclass(frozen=True)
class Case:
    id: str
    params: dict[str, Any]
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    raises: str | None

    @property
    def fn(self) -> str | None:
        return self.params.get("fn")


@functools.cache
def load(group: str) -> list[Case]:
    document = json.loads((FOLDER / f"{group}.json").read_text())
    file = FOLDER / f"{group}.safetensors"
    tensors = load_file(file) if file.exists() else {}
    cases = []
    for raw in document["cases"]:
        sides: dict[str, dict[str, Any]] = {"in": dict(raw.get("inputs", {})), "out": dict(raw.get("outputs", {}))}
        for key, tensor in tensors.items():
            case_id, side, name = key.split(".", 2)
            if case_id == raw["id"]:
                sides[side][name] = tensor
        cases.append(Case(raw["id"], raw["params"], sides["in"], sides["out"], raw.get("raises")))
    assert len(cases) == document["meta"]["num_cases"]
    return cases


class Coverage:
    """Which cases of a group are tested, and which are left out for a stated reason."""

    def __init__(self, group: str) -> None:
        self.cases = load(group)
        self._tested: set[str] = set()
        self._left_out: dict[str, str] = {}

    def where(self, condition: Callable[[Case], bool]) -> pytest.MarkDecorator:
        """Parametrize a test over the cases that meet ``condition``; there must be some."""
        chosen = [case for case in self.cases if condition(case)]
        assert chosen
        self._tested.update(case.id for case in chosen)
        return pytest.mark.parametrize("case", chosen, ids=[case.id for case in chosen])

    def leave_out(self, condition: Callable[[Case], bool], reason: str) -> None:
        chosen = [case.id for case in self.cases if condition(case)]
        assert chosen
        assert reason
        self._left_out.update(dict.fromkeys(chosen, reason))

    def check(self, *, tested: int, left_out: int) -> None:
        """Every case is tested or left out with a reason, never both, and their numbers are as the test says."""
        assert not self._tested & set(self._left_out)
        assert self._tested | set(self._left_out) == {case.id for case in self.cases}
        assert (len(self._tested), len(self._left_out)) == (tested, left_out)


def assert_close(actual: Tensor | float, expected: Tensor | float, *, rel: float = 1e-5, off: float = 1e-6) -> None:
    """Compare in double precision at the tolerance of most groups; shapes may differ by axes of length 1."""
    actual = torch.as_tensor(actual).detach().double()
    expected = torch.as_tensor(expected).double()
    torch.testing.assert_close(actual, expected.reshape(actual.shape), rtol=rel, atol=off, equal_nan=True)


def number(value: float | str) -> float:
    return float(value) if isinstance(value, str) else value


def assert_metrics(actual: dict[str, float], expected: dict[str, float | str], *, rel: float = 1e-5) -> None:
    for name, value in expected.items():
        assert math.isclose(actual[name], number(value), rel_tol=rel, abs_tol=1e-6), (name, actual[name], value)


def group_index(names: list[str]) -> Tensor:
    order = {name: slot for slot, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([order[name] for name in names])


def flow_grpo_loss(
    log_probs: Tensor, mean: Tensor, std_dev_t: Tensor, batch: Mapping[str, Tensor], **options: Any
) -> LossOutput:
    rows = len(log_probs)
    current = Current(
        log_probs=log_probs,
        prev_sample_mean=mean,
        std=torch.full((rows,), torch.nan),  # nothing here may read it
        std_dev_t=std_dev_t.flatten(),
        sqrt_dt=torch.full((rows,), torch.nan),
        velocity=torch.full_like(mean, torch.nan),
    )
    algorithm = registry.component("algorithm", "flow_grpo")
    return algorithm.loss(current, batch, registry.options("algorithm", "flow_grpo", options))
