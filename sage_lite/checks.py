"""Checks on what a user gives: each returns the clean value, or raises UserError naming the bad one."""
from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sage_lite.errors import UserError


def reward_groups(rewards: Tensor, name: str = "rewards") -> Tensor:
    """Rewards as a detached, finite float tensor with a group axis, or a UserError that names what is wrong."""
    try:
        r = torch.as_tensor(rewards).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{name} must be a tensor of numbers, got {rewards!r} ({error}); "
                        "for None (a missing reward) use sage_lite.advantages.grouped") from None
    if r.is_complex():
        raise UserError(f"{name} must be real, got {r.dtype}")
    if r.dim() == 0 or r.shape[-1] == 0:
        raise UserError(f"{name} need a last axis of at least one entry (the group), got shape {tuple(r.shape)}")
    r = r if r.dtype is torch.float64 else r.float()
    if not r.sum().isfinite():  # far cheaper than looking at each; only a sum that overflows looks in vain
        complain(r, ~r.isfinite(), f"{name} must be finite")
    return r


def within(r: Tensor, rule: str, low: float, high: float = math.inf) -> None:
    """UserError with `rule` and the first reward outside [low, high]."""
    complain(r, (r < low) | (r > high), rule)


def complain(r: Tensor, bad: Tensor, rule: str) -> None:
    """UserError with `rule` and the first entry of `r` where `bad` is true."""
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        raise UserError(f"{rule}, got {r[index].item()!r} at index {index if len(index) > 1 else index[0]}")


def number(name: str, value: Any, above: float | None = None, at_least: float | None = None) -> float:
    """`value` as a finite float within its bound, or a UserError that names the parameter and the value."""
    rule = f"{name} must be a finite number"
    rule += f" above {above:g}" if above is not None else "" if at_least is None else f" of at least {at_least:g}"
    try:
        number = math.nan if isinstance(value, (str, bool)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or (above is not None and number <= above) or (
            at_least is not None and number < at_least):
        raise UserError(f"{rule}, got {value!r}")
    return number


def group_size(value: Any) -> int:
    """`value` as a whole number M >= 1, or a UserError."""
    try:
        size = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = 0
    if size < 1:
        raise UserError(f"group_size must be a whole number of at least 1, got {value!r}")
    return size


def probability(name: str, value: Any) -> np.ndarray:
    """`value`, a number or an array, as a float64 array with entries in [0, 1], or a UserError."""
    try:
        p = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise UserError(f"{name} must be a number or an array of numbers in [0, 1], got {value!r}") from None
    bad = ~((p >= 0.0) & (p <= 1.0))
    if bad.any():
        raise UserError(f"{name} must lie in [0, 1], got {p[bad].flat[0]}")
    return p
