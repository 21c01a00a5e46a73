"""Keys and values of a batch: selecting and sharing rows, whichever form the model gives them in."""

from __future__ import annotations

import copy
from typing import Any

import torch


def select_rows(cache: Any, rows: torch.Tensor) -> Any:
    """The cache of the batch rows `rows` [n], in that order, repeats allowed; `cache` itself is used up.

    cache: a transformers Cache, whose layers are replaced one by one, so that never two whole caches are held; or a
    tuple of (keys, values) a layer, as Unsloth's models use.
    """
    if isinstance(cache, tuple):
        return tuple((keys[rows], values[rows]) for keys, values in cache)
    cache.batch_select_indices(rows)
    return cache


def share(cache: Any) -> Any:
    """The same keys and values in a cache of its own, so that selecting rows leaves the first as it is."""
    if isinstance(cache, tuple):
        return cache
    new = copy.copy(cache)
    if hasattr(cache, "layers"):
        new.layers = [copy.copy(layer) for layer in cache.layers]
    else:  # transformers before 4.54
        new.key_cache, new.value_cache = list(cache.key_cache), list(cache.value_cache)
    return new
