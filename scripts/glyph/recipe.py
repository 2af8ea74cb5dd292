"""The recipe of the shipped weights, and how a recipe is run from start to end."""

from pathlib import Path

import torch

from scripts.glyph.loop import Budget
from scripts.glyph.networks import Glyph
from scripts.glyph.render import StyleMixture
from scripts.glyph.train import Recipe, Stage, Trainer

EASY = StyleMixture()
WIDE = StyleMixture(contrast=0.45, blur=0.2, stroke=0.15, slant=0.2, clutter=0.25, size=0.2)
SHIPPED_SHARE = 0.5  # of WIDE's hard styles; decides how well the shipped model can be read


def shipped() -> Recipe:
    """What made the weights in the package.

    Letters are learned fastest from easy styles, then hard ones are added, more of them than the final mixture has.
    """
    return Recipe(
        vae_batch=256,
        vae_mixture=WIDE,
        vae=Budget(steps=1400, peak_learning_rate=2e-3),
        batch=512,
        stages=(
            Stage("letters", EASY, Budget(steps=6600, peak_learning_rate=1.5e-3)),
            Stage("wide", WIDE, Budget(steps=7800, peak_learning_rate=1e-3)),
            Stage("final", WIDE.scaled(SHIPPED_SHARE), Budget(steps=10000, peak_learning_rate=1e-3)),
        ),
    )


def tiny() -> Recipe:
    """A few steps of everything on any machine."""
    brief = Budget(steps=2, peak_learning_rate=1e-3)
    stages = (Stage("letters", EASY, brief), Stage("final", WIDE, brief))
    return Recipe(vae_batch=4, vae_mixture=WIDE, vae=brief, batch=4, stages=stages)


def run(recipe: Recipe, out: Path, seed: int, resume_after: str | None = None) -> None:
    """Train by ``recipe``; the pipeline after every stage is saved as ``out/<stage>``, the result is the last.

    A stage starts from the float16 weights of the one before and from its own seed, so ``resume_after``, the name of
    a stage whose folder exists, skips what came before it without changing what follows.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [stage.name for stage in recipe.stages]
    first = names.index(resume_after) + 1 if resume_after else 0
    torch.manual_seed(seed)
    glyph = Glyph.load(str(out / resume_after), device) if resume_after else Glyph.build(device)
    trainer = Trainer(glyph, recipe, device)
    if not resume_after:
        trainer.train_vae()
    for number, stage in enumerate(recipe.stages[first:], start=first + 1):
        torch.manual_seed(seed + number)
        trainer.train_stage(stage)
        glyph.save(str(out / stage.name))
