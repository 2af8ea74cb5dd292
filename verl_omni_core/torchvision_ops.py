"""Declare the two operator schemas that torchvision's Python part expects, where its compiled part cannot load.

PyPI's torchvision is a CUDA build. Beside a CPU build of torch its library does not load, and its Python part then
fails because it attaches fake kernels to operators that nobody declared. Declaring the schemas is enough for
``torchvision.transforms``, which transformers, diffusers and vLLM-Omni import. torch calls :func:`declare` at the end
of ``import torch`` through the entry-point group ``torch.backends``, so it holds in every process.
"""

_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library = None  # torch drops the declarations when this object is collected


def declare() -> None:
    """Declare ``torchvision::nms`` and ``torchvision::qnms``; does nothing beside a CUDA build of torch or twice."""
    global _library
    import torch

    if _library is not None or torch.version.cuda is not None:
        return
    try:
        torch._C._get_schema("torchvision::nms", "")
    except RuntimeError:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in _OPERATORS:
            _library.define(operator + _SIGNATURE)
