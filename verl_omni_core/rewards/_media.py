"""The one picture layout that scorers take, checked where it enters."""

import numpy as np

from verl_omni_core.errors import ContractError


def pixels_hwc(image: np.ndarray) -> np.ndarray:
    """Return a picture as image libraries want it.

    Args:
        image: uint8 [3, H, W], RGB, 0 to 255.
    Returns: uint8 [H, W, 3], contiguous.
    Raises: ContractError for any other dtype or layout; nothing is guessed or cast.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[0] != 3:
        raise ContractError(
            f"expected a uint8 picture [3, H, W], got {image.dtype} {list(image.shape)}; scorers take pixels from 0 to "
            "255, channels first"
        )
    return np.ascontiguousarray(image.transpose(1, 2, 0))
