"""The OCR reward: how much of the target text the recogniser reads in a picture."""

import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context

import numpy as np
from PIL import Image
from rapidfuzz.distance import Levenshtein

ENLARGE = 4


def ocr_reward(read: str, target: str) -> float:
    """1 if the target stands in what was read, else 1 minus the edit distance (at most the length) over the length."""
    read, target = (text.replace(" ", "").lower() for text in (read, target))
    if target in read:
        return 1.0
    return 1.0 - min(Levenshtein.distance(read, target), len(target)) / len(target)


@cache
def _engine():
    from rapidocr import RapidOCR

    return RapidOCR(params={"EngineConfig.onnxruntime.intra_op_num_threads": 1, "Global.log_level": "error"})


def read_picture(pixels_HWC: np.ndarray) -> str:
    """The text the recogniser sees in one uint8 picture, enlarged four times; empty if it sees none."""
    height, width = pixels_HWC.shape[:2]
    size = (width * ENLARGE, height * ENLARGE)
    enlarged = Image.fromarray(pixels_HWC).resize(size, Image.Resampling.BICUBIC)
    result = _engine()(np.asarray(enlarged), use_det=False, use_cls=False, use_rec=True)
    return result.txts[0] if result.txts else ""


class Reader:
    """Reads pictures on several processes."""

    def __init__(self, processes: int | None = None):
        self.pool = ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn"))

    def read(self, pixels_BHWC: np.ndarray) -> list[str]:
        """What stands in each picture of a uint8 batch."""
        return list(self.pool.map(read_picture, pixels_BHWC, chunksize=8))

    def rewards(self, pixels_BHWC: np.ndarray, targets: list[str]) -> list[float]:
        """The OCR reward of each picture."""
        return [ocr_reward(text, target) for text, target in zip(self.read(pixels_BHWC), targets, strict=True)]

    def close(self) -> None:
        """End the processes."""
        self.pool.shutdown(cancel_futures=True)
