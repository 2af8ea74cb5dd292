"""Makes the glyph that ships with the package: ``python -m scripts.glyph --help``."""

import argparse
import json
from pathlib import Path

import torch

from scripts.glyph.networks import Glyph
from scripts.glyph.ocr import Reader
from scripts.glyph.prompts import read_texts, write_prompts

PACKAGE = Path(__file__).parents[2] / "verl_omni_core" / "glyph"


def main() -> None:
    """Parse the command line and run one command."""
    parser = argparse.ArgumentParser(prog="python -m scripts.glyph", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    prompts = commands.add_parser("prompts", help="write the prompt files")
    prompts.add_argument("--out", type=Path, default=PACKAGE / "prompts")
    train = commands.add_parser("train", help="train and save a pipeline folder")
    train.add_argument("--out", type=Path, required=True)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--resume-after", help="the last stage whose folder is already in OUT")
    train.add_argument("--tiny", action="store_true", help="a few steps of everything, to test the script")
    measure = commands.add_parser("measure", help="score a pipeline folder on the held-out prompts")
    measure.add_argument("--model", default=str(PACKAGE / "pipeline"))
    measure.add_argument("--prompts", type=Path, default=PACKAGE / "prompts" / "validation.parquet")
    measure.add_argument("--steps", type=int, nargs="+", default=[8, 10])
    arguments = parser.parse_args()
    {"prompts": _prompts, "train": _train, "measure": _measure}[arguments.command](arguments)


def _prompts(arguments: argparse.Namespace) -> None:
    write_prompts(arguments.out)


def _train(arguments: argparse.Namespace) -> None:
    from scripts.glyph.recipe import run, shipped, tiny

    recipe = tiny() if arguments.tiny else shipped()
    run(recipe, arguments.out, arguments.seed, arguments.resume_after)


def _measure(arguments: argparse.Namespace) -> None:
    from scripts.glyph.measure import measure

    device = "cuda" if torch.cuda.is_available() else "cpu"
    glyph, reader = Glyph.load(arguments.model, device), Reader()
    for steps in arguments.steps:
        score = measure(glyph, read_texts(arguments.prompts), steps, reader, device)
        print(json.dumps(score.as_dict()), flush=True)
    reader.close()


if __name__ == "__main__":
    main()
