"""How well a text recogniser can read the wanted text in a picture.

Range 0 to 1, higher is better. Any text beside the wanted one is free, as in Flow-GRPO's reward; ``read_length`` among
the extras shows a policy that exploits this.
"""

import importlib.metadata
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field

from verl_omni_core.rewards._contract import Score, Scorer, ScoringItem
from verl_omni_core.rewards._media import pixels_hwc

_QUOTED = re.compile(r'"([^"]*)"')


@dataclass(frozen=True)
class Options:
    """Options of the scorer."""

    upscale: Annotated[int, Field(ge=1, le=16, description="Factor by which a picture is enlarged before reading.")] = 4
    recognition_only: Annotated[
        bool, Field(description="Read the whole picture as one line, without looking for lines of text in it.")
    ] = True
    detection_side: Annotated[
        int, Field(ge=32, description="Longest side at which lines are looked for, pixels; without recognition_only.")
    ] = 256
    normalize: Annotated[
        bool, Field(description="Unify full-width and composed characters (Unicode NFKC) on both sides.")
    ] = False
    threads: Annotated[int, Field(ge=1, description="Threads of one reading.")] = 1


class Recognizer(Protocol):
    """Reads a picture: uint8 [H, W, 3] to lines of (text, confidence)."""

    def __call__(self, pixels_HWC: np.ndarray) -> Sequence[tuple[str, float]]: ...


class OcrScorer:
    """One minus the edit distance between read and wanted text, as a share of the wanted text's length."""

    RANGE = (0.0, 1.0)
    CONCURRENCY = 1
    """A reading fills its thread, and the result must not depend on how many run."""

    def __init__(self, recognizer: Recognizer, options: Options) -> None:
        self._recognizer = recognizer
        self._options = options
        self.VERSION = f"1+rapidocr-{importlib.metadata.version('rapidocr')}"

    def score(self, items: Sequence[ScoringItem]) -> list[Score]:
        """Read each picture and compare.

        Returns: a score an item, in order; extras ``text`` (what was read), ``acc`` (1.0 where the score is perfect)
            and ``read_length`` (characters read). An item that names no wanted text has a missing score.
        Raises: ContractError for a picture that is not uint8 [3, H, W]; whatever the recogniser raises.
        """
        return [self._score(item) for item in items]

    def _score(self, item: ScoringItem) -> Score:
        target = wanted_text(item.prompt, item.ground_truth)
        if target is None:
            return Score(
                None,
                f'sample {item.sample_id}: no ground truth and no "quoted" text in the prompt {item.prompt!r}; give a '
                "ground truth column or quote the wanted text",
            )
        lines = self._recognizer(_enlarged(pixels_hwc(item.image), self._options.upscale))
        text = "".join(line for line, confidence in lines if confidence > 0)
        value = text_score(text, target, normalize=self._options.normalize)
        return Score(value, extra={"text": text, "acc": float(value == 1.0), "read_length": float(len(text))})


def wanted_text(prompt: str, ground_truth: str | None) -> str | None:
    """Return the text that a picture should show: the ground truth, else the prompt's first double-quoted span."""
    if ground_truth is not None:
        return ground_truth
    quoted = _QUOTED.search(prompt)
    return quoted.group(1) if quoted else None


def text_score(text: str, target: str, *, normalize: bool = False) -> float:
    """Compare what was read with what was wanted.

    Both sides lose their spaces and their case. A target that stands anywhere in the text is perfect; else the
    Levenshtein distance counts, at most the target's length. An empty target is met by an empty text only.

    Returns: 0 to 1.
    Source: Flow-GRPO, Liu et al. 2025 (arXiv:2505.05470), OCR reward. Its code has no score for an empty target.
    """
    from rapidfuzz.distance import Levenshtein

    if normalize:
        text, target = unicodedata.normalize("NFKC", text), unicodedata.normalize("NFKC", target)
    text, target = text.replace(" ", "").lower(), target.replace(" ", "").lower()
    if not target:
        return float(not text)
    if target in text:
        return 1.0
    return 1 - min(Levenshtein.distance(text, target), len(target)) / len(target)


def build(options: Options) -> Scorer:
    """Load the recogniser and return the scorer."""
    return OcrScorer(_rapidocr(options), options)


def _rapidocr(options: Options) -> Recognizer:
    from rapidocr import RapidOCR

    engine = RapidOCR(
        params={
            "Global.log_level": "critical",
            "Global.use_det": not options.recognition_only,
            "Global.use_cls": False,
            # confidence is filtered here, so that both ways of reading drop the same lines
            "Global.text_score": 0.0,
            "Det.limit_type": "max",
            "Det.limit_side_len": options.detection_side,
            "EngineConfig.onnxruntime.intra_op_num_threads": options.threads,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
        }
    )

    def read(pixels_HWC: np.ndarray) -> list[tuple[str, float]]:
        found: Any = engine(pixels_HWC)
        return [] if found.txts is None else list(zip(found.txts, map(float, found.scores), strict=True))

    return read


def _enlarged(pixels_HWC: np.ndarray, factor: int) -> np.ndarray:
    if factor == 1:
        return pixels_HWC
    from PIL import Image

    height, width, _ = pixels_HWC.shape
    return np.asarray(Image.fromarray(pixels_HWC).resize((width * factor, height * factor), Image.Resampling.BICUBIC))
