"""Writes measured numbers into the model card."""

from pathlib import Path

from scripts.glyph.measure import SEEDS, Score

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def update_card(card: Path, scores: list[Score], prompts: int) -> None:
    """Replace the card's block of measured numbers."""
    before, rest = card.read_text().split(BEGIN)
    _, after = rest.split(END)
    card.write_text(f"{before}{BEGIN}\n{_table(scores, prompts)}\n{END}{after}")


def _table(scores: list[Score], prompts: int) -> str:
    heading = f"{prompts} held-out prompts x {len(SEEDS)} seeds, weights as shipped (float16), computed in float32:"
    rows = [
        "| sampling steps | mean OCR reward | exact | reward 0 | mean of each prompt's best seed |",
        "|---|---|---|---|---|",
    ]
    for score in scores:
        shares = f"{score.exact_share:.0%} | {score.unread_share:.0%}"
        rows.append(f"| {score.steps} | {score.mean_reward:.3f} | {shares} | {score.best_of_seeds:.3f} |")
    return "\n".join([heading, "", *rows])
