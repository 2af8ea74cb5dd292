"""Makes the glyph that ships with the package: ``python -m scripts.glyph --help``."""

import argparse
from pathlib import Path

import torch

PACKAGE = Path(__file__).parents[2] / "verl_omni_core" / "glyph"


def main() -> None:
    """Parse the command line and run one command."""
    parser = argparse.ArgumentParser(prog="python -m scripts.glyph", description=__doc__)
    commands = parser.add_subparsers(required=True)

    prompts = commands.add_parser("prompts", help="write the prompt files")
    prompts.add_argument("--out", type=Path, default=PACKAGE / "prompts")
    prompts.set_defaults(run=_prompts)

    train = commands.add_parser("train", help="train, and save a pipeline folder after every stage")
    train.add_argument("--out", type=Path, required=True)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--resume-after", help="the last stage whose folder is already in OUT")
    train.add_argument("--tiny", action="store_true", help="a few steps of everything, to test the script")
    train.set_defaults(run=_train)

    measure = commands.add_parser("measure", help="score a pipeline folder on the held-out prompts")
    measure.add_argument("--model", default=str(PACKAGE / "pipeline"))
    measure.add_argument("--prompts", type=Path, default=PACKAGE / "prompts" / "validation.parquet")
    measure.add_argument("--steps", type=int, nargs="+", default=[8, 10, 20])
    measure.add_argument("--card", type=Path, help="model card whose block of measured numbers is replaced")
    measure.set_defaults(run=_measure)

    arguments = parser.parse_args()
    arguments.run(arguments)


def _prompts(arguments: argparse.Namespace) -> None:
    from scripts.glyph.prompts import write_prompts

    write_prompts(arguments.out)


def _train(arguments: argparse.Namespace) -> None:
    from scripts.glyph.recipe import run, shipped, tiny

    run(tiny() if arguments.tiny else shipped(), arguments.out, arguments.seed, arguments.resume_after)


def _measure(arguments: argparse.Namespace) -> None:
    from scripts.glyph.card import update_card
    from scripts.glyph.measure import measure
    from scripts.glyph.networks import Glyph
    from scripts.glyph.ocr import Reader
    from scripts.glyph.prompts import read_texts

    device = "cuda" if torch.cuda.is_available() else "cpu"
    glyph, reader, texts = Glyph.load(arguments.model, device), Reader(), read_texts(arguments.prompts)
    scores = []
    for steps in arguments.steps:
        scores.append(measure(glyph, texts, steps, reader, device))
        print(scores[-1], flush=True)
    reader.close()
    if arguments.card:
        update_card(arguments.card, scores, len(texts))


if __name__ == "__main__":
    main()
