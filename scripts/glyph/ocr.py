"""Reads many pictures at once with the package's own OCR scorer."""

import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context

import numpy as np

from verl_omni_core.rewards import ocr
from verl_omni_core.rewards._contract import Scorer, ScoringItem


@cache
def _scorer() -> Scorer:
    return ocr.build(ocr.Options())


def reward(picture_CHW: np.ndarray, target: str) -> float:
    """The OCR reward of one uint8 picture, at the scorer's default options."""
    score = _scorer().score([ScoringItem(sample_id=target, image=picture_CHW, prompt="", ground_truth=target)])[0]
    if score.value is None:
        raise RuntimeError(score.error)
    return score.value


class Reader:
    """Scores pictures on several processes."""

    def __init__(self, processes: int | None = None):
        self.pool = ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn"))

    def rewards(self, pictures_BCHW: np.ndarray, targets: list[str]) -> list[float]:
        """The OCR reward of each picture of a uint8 batch."""
        return list(self.pool.map(reward, pictures_BCHW, targets, chunksize=16))

    def close(self) -> None:
        """End the processes."""
        self.pool.shutdown(cancel_futures=True)
