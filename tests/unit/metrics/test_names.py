"""The one list of names."""

import pytest

from verl_omni_core.metrics.names import METRICS, metric_of


def test_names_are_unique_and_defined() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert all(metric.definition for metric in METRICS)


@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        ("actor/ratio_std", "std"),
        ("actor/ratio_deviation", "max"),
        ("critic/rewards/max", "max"),
        ("critic/reward/ocr/mean", "mean"),
        ("timing_s/update_actor", "sum"),
        ("rollout_corr/logprob_abs_diff/ts_900", "mean"),
        ("actor/rollout_corr/log_ppl_diff_max", "max"),
        ("val-core/glyph/reward/best@4/mean", "last"),
    ],
)
def test_a_name_or_its_family_says_how_it_reduces(name: str, reduction: str) -> None:
    metric = metric_of(name)
    assert metric is not None
    assert metric.reduction == reduction


def test_containing_max_does_not_make_a_maximum() -> None:
    """Reductions are declared; a name that merely contains 'max' or 'min' says nothing."""
    metric = metric_of("critic/reward/max_legibility/mean")
    assert metric is not None
    assert metric.reduction == "mean"


def test_an_unknown_name_is_nobodys() -> None:
    assert metric_of("actor/ratio_maen") is None
