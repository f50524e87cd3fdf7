"""In the place of torchvision, whose wheels on PyPI want a torch built for CUDA: names that vLLM's and transformers'
files for pictures import, though a model that is shown none uses none of them."""

import sys
from types import ModuleType
from typing import Any

__version__ = "0"
__path__: list[str] = []
NAMES: dict[str, dict[str, Any]] = {
    "io": {"ImageReadMode": None, "decode_image": None},
    "transforms": {"InterpolationMode": type("InterpolationMode", (), dict.fromkeys(
        ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
    ))},
    "transforms.functional": {"pil_to_tensor": None},
    "transforms.v2": {"functional": None},
    "transforms.v2.functional": {},
}  # fmt: skip

for name, held in NAMES.items():
    module = sys.modules[f"{__name__}.{name}"] = ModuleType(f"{__name__}.{name}")
    module.__path__ = []
    vars(module).update(held)
