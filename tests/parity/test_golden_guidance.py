"""Guidance of VeRL-Omni: the formula itself, and what the adapter makes of it for engine and trainer."""

import torch

from tests.parity.golden import Case, Coverage, assert_close
from verl_omni_core import registry
from verl_omni_core.models._guidance import classifier_free_guidance

CFG = Coverage("cfg")
PLAIN = ("apply_cfg", "apply_x0_cfg")
CFG.leave_out(lambda case: case.fn == "apply_true_cfg", "renormalised guidance, of models that have no adapter here")
CFG.leave_out(lambda case: case.fn == "_combine_cfg", "guidance of two scales, of a model that has no adapter here")


@CFG.where(lambda case: case.fn in PLAIN)
def test_guidance_equals_the_peer(case: Case) -> None:
    positive, negative, scale = case.inputs["positive"], case.inputs["negative"], case.params["scale"]
    expected = case.outputs["out"]
    assert_close(classifier_free_guidance(positive, negative, scale), expected)
    answers = {"positive": positive, "negative": negative}
    adapter = registry.component("model", "sd3").build(None)
    conditioning = {
        f"{prefix}{name}": answers[branch]
        for branch, prefix in (("positive", ""), ("negative", "negative_"))
        for name in adapter.facts.conditioning
    }
    asked = []

    def denoiser(**inputs: torch.Tensor) -> tuple[torch.Tensor]:
        asked.append(inputs["hidden_states"])
        return (inputs["encoder_hidden_states"],)  # the branch's answer

    latents, timestep = torch.zeros_like(positive), torch.full((len(positive),), 500.0)
    assert_close(adapter.velocity(denoiser, latents, timestep, conditioning, scale), expected)
    assert len(asked) == 2


def test_every_case_is_covered_or_left_out_with_a_reason() -> None:
    CFG.check(tested=4, left_out=14)
