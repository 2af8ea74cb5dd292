"""The results of the suite, a JSON line a case, and the page that they render to: ``python -m tests.faults.page``."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.faults.cases import GROUPS, all_cases
from tests.faults.size import PACKS, PROMPTS, SAMPLES

RESULTS = Path(__file__).with_name("results.jsonl")
PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
_HEAD = """# Faults

Written by `make test-faults` from `tests/faults/results.jsonl`; a test compares them. Do not edit.

Each row is a fault that the suite injected into a real run: the flow `online` in a process of its own with a Prefect
server, a Ray cluster, vLLM-Omni and a trainer of two ranks, on the embedded glyph model in deterministic mode, three
steps of {samples} samples in {packs} packs and {updates} optimizer steps each. Rows of one table often hit one run, one
after the other. Measured on two shared cores.

- *Seconds*: until the run began new work, that is an attempt at a stage which was not done. From the start of the new
  flow process where the fault ended the old one, else from the fault.
- *Packs*: drawn by the next attempt at the stage that the fault broke off. All others were taken over.
- *Equal*: the digest of the final weights, and of their average, is that of a run which met no fault.

Of every one of these runs the suite also checks that the ledger has each update once, with the digest of the batch that
the store holds; that every sample was trained in one update; that every row was drawn by the policy version of its
step; and that every committed file has the digest of its manifest.
"""


@dataclass(frozen=True)
class Outcome:
    """What became of a run after one fault."""

    case: str
    happened: str
    """In plain words."""
    seconds: float
    packs: int
    equal: bool


def read() -> list[Outcome]:
    """Return the recorded results."""
    return [Outcome(**json.loads(line)) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def record(outcomes: Iterable[Outcome]) -> None:
    """Put new results in the place of older ones of the same case, and write the page."""
    known = {outcome.case: outcome for outcome in (*read(), *outcomes)}
    lines = [json.dumps(asdict(known[case])) for case in all_cases() if case in known]
    RESULTS.write_text("".join(f"{line}\n" for line in lines))
    PAGE.write_text(render(read()))


def render(outcomes: Iterable[Outcome]) -> str:
    """Return the page."""
    known = {outcome.case: outcome for outcome in outcomes}
    parts = [_HEAD.format(samples=SAMPLES, packs=PACKS, updates=PROMPTS)]
    for heading, cases in GROUPS.items():
        rows = [_row(fault, known[case]) for case, fault in cases.items() if case in known]
        head = "| fault | what happened | seconds | packs | equal |\n|---|---|---|---|---|"
        if rows:
            parts.append("\n".join([f"## {heading}\n", head, *rows]) + "\n")
    return "\n".join(parts)


def _row(fault: str, outcome: Outcome) -> str:
    return (
        f"| {fault} | {outcome.happened} | {outcome.seconds:.1f} | {outcome.packs} | "
        f"{'yes' if outcome.equal else '**no**'} |"
    )


if __name__ == "__main__":
    record([])
