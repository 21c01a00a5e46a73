"""Running out of memory costs a repetition, not the run: do the work again, half as much at a time."""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass
from typing import Callable, TypeVar

import torch

from sage_lite.errors import UserError

T = TypeVar("T")
WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cublas_status_alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out; on a CPU, torch says it with a plain RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS)


@dataclass
class Limit:
    """How much is computed at a time: `value`, in units of its setting `name`; it shrinks when memory runs out."""

    name: str
    value: int

    def run(self, work: Callable[[int], T], *, whole: int, least: int = 1) -> T:
        """`work(value)`; when it runs out of memory, again with half of it, said once, and so on.

        `work` must start from nothing each time: what a failed try has left behind may not count. whole: the size at
        which all would be done at once. least: the smallest that differs from the next smaller; if that does not fit
        either, UserError.
        """
        tried, first = self.value, None
        while True:
            try:
                result = work(self.value)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                first = first or f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
            # Only out here are the failed try's tensors free, which the traceback held.
            now = min(self.value, whole)
            if now <= least:
                raise UserError(
                    f"out of memory even with {self.name}={now}, the smallest there is. Take a smaller model, 4-bit "
                    f"weights, fewer tokens or gradient_checkpointing. The first error was {first}"
                )
            self.value = max(least, now // 2)
            release()
        if first is not None:
            warnings.warn(
                f"out of memory with {self.name}={tried}: it goes on with {self.value} ({first})", stacklevel=3
            )
        return result


def release() -> None:
    """Give memory that nothing uses any more back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
