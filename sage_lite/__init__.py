"""SAGE-lite: softmax group advantages for language-model reinforcement learning, derived, implemented and measured.

`import sage_lite` loads no heavy library; `sage_lite.theory`, `sage_lite.advantages`, … are imported when first used.
"""

from __future__ import annotations

import importlib
import pkgutil

__version__ = "0.1.0"
__all__ = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def __getattr__(name: str):
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
