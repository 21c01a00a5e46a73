"""Checks on what a user gives: each returns the clean value, or raises UserError naming the bad one."""
from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sage_lite.errors import UserError

_ORDERS, _GROUPS = 8, 12  # orders and groups in which the symmetry of a function is tried
_EXACT = 2**24  # float32 holds every whole number up to here


def real_tensor(rewards: Any, name: str = "rewards", double: bool = False) -> Tensor:
    """Rewards as a detached tensor of real numbers, or a UserError; a list of floats, with `double`, as float64."""
    dtype = torch.float64 if double and isinstance(rewards, (list, tuple)) else None
    try:
        r = torch.as_tensor(rewards, dtype=dtype).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        hint = "give a finite number for each" if double else "for None (a missing reward) use advantages.grouped"
        raise UserError(f"{name} must be a tensor of numbers, got {rewards!r} ({error}); {hint}") from None
    if r.is_complex():
        raise UserError(f"{name} must be real, got {r.dtype}")
    return r


def reward_groups(rewards: Tensor, name: str = "rewards", double: bool = False) -> Tensor:
    """Rewards as a detached, finite float tensor with a group axis, or a UserError that names what is wrong.

    float64 stays, whole numbers that float32 cannot hold become float64, all else float32; with `double` all float64.
    """
    r = real_tensor(rewards, name, double)
    if r.dim() == 0 or r.shape[-1] == 0:
        raise UserError(f"{name} need a last axis of at least one entry (the group), got shape {tuple(r.shape)}")
    if double or r.dtype is torch.float64 or (not r.is_floating_point() and (r.double().abs() > _EXACT).any()):
        r = r.double()
    else:
        r = r.float()
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


def symmetric(function: Callable[[Tensor], Tensor], groups: Tensor, values: Tensor) -> None:
    """UserError unless `values[G, M]`, what `function` gave for `groups[G, M]`, depend on nothing but each group's
    rewards: a few groups alone must get the same, and in other orders the same in that order (to float32 rounding)."""
    tolerance = 1e-5 * float(values.abs().max())

    def compare(rewards: Tensor, expected: Tensor, why: str) -> None:
        found = function(rewards)
        bad = ((found - expected).abs() > tolerance).nonzero()
        if len(bad):
            group, at = tuple(bad[0, :-1].tolist()), tuple(bad[0].tolist())
            raise UserError(f"the advantage is no function of a rollout's reward and its group's rewards: in the group "
                            f"{shown(rewards[group])} a reward of {float(rewards[at]):g} got {float(expected[at]):.6g} "
                            f"and {float(found[at]):.6g}; {why}")

    some, order = spread(len(groups), _GROUPS), orders(groups.shape[-1])
    for i in some[:, None]:
        compare(groups[i], values[i], "it depends on other groups: reduce over the last axis, r.mean(-1, keepdim=True)")
    compare(groups[some][:, order], values[some][:, order], "it depends on the order of the rollouts")


def orders(group_size: int) -> np.ndarray:
    """Positions of a group's rollouts in some other orders, [orders, M], always the same ones."""
    return np.random.default_rng(0).permuted(np.tile(np.arange(group_size), (_ORDERS, 1)), axis=1)


def spread(count: int, most: int) -> np.ndarray:
    """At most `most` indices below `count`, evenly spaced, both ends included."""
    return np.unique(np.linspace(0, count - 1, most).round().astype(int))


def shown(group: Tensor) -> str:
    """A group's rewards for a message, cut after the first dozen."""
    first = ", ".join(f"{x:g}" for x in group[:12].tolist())
    return f"[{first}]" if len(group) <= 12 else f"[{first}, ...] ({len(group)} rollouts)"


def number(name: str, value: Any, above: float | None = None, at_least: float | None = None) -> float:
    """`value` as a finite float within its bound, or a UserError that names the parameter and the value."""
    rule = f"{name} must be a finite number"
    rule += f" above {above:g}" if above is not None else "" if at_least is None else f" of at least {at_least:g}"
    number = _float(value)
    if not math.isfinite(number) or (above is not None and number <= above) or (
            at_least is not None and number < at_least):
        raise UserError(f"{rule}, got {value!r}")
    return number


def whole(name: str, value: Any, at_least: int) -> int:
    """`value` as a whole number of at least `at_least`, or a UserError."""
    try:
        count = at_least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = at_least - 1
    if count < at_least:
        raise UserError(f"{name} must be a whole number of at least {at_least}, got {value!r}")
    return count


def group_size(value: Any) -> int:
    """`value` as a whole number M >= 1, or a UserError."""
    return whole("group_size", value, 1)


def std_ddof(value: Any) -> int:
    """`value` if it is 0 or 1, or a UserError."""
    if _float(value) not in (0.0, 1.0):
        raise UserError(f"ddof must be 0 (population std) or 1 (sample std), got {value!r}")
    return int(value)


def array(value: Any) -> np.ndarray:
    """A number, an array, a tensor of any kind and place, or a list of them as a float64 array.

    Raises TypeError or ValueError for anything else, a string and a complex number included.
    """
    a = np.asarray(_without_tensors(value))
    if a.dtype.kind in "USc":
        raise TypeError(f"no real number: {value!r}")
    return a.astype(np.float64)


def probability(name: str, value: Any) -> np.ndarray:
    """`value`, a number or an array, as a float64 array with entries in [0, 1], or a UserError.

    What passes an end by no more than the rounding of a sum of probabilities counts as that end.
    """
    try:
        p = array(value)
    except (TypeError, ValueError):
        raise UserError(f"{name} must be a number or an array of numbers in [0, 1], got {value!r}") from None
    bad = ~((p >= -1e-12) & (p <= 1.0 + 1e-12))
    if bad.any():
        raise UserError(f"{name} must lie in [0, 1], got {p[bad].flat[0]}")
    return np.asarray(p.clip(0.0, 1.0))


def _float(value: Any) -> float:
    """`value` as a float, NaN if it is no number."""
    try:
        return math.nan if isinstance(value, (str, bool)) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last from a tensor of several entries
        return math.nan


def _without_tensors(value: Any) -> Any:
    """`value` with numpy arrays in place of tensors, also inside lists."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return (value if value.is_complex() else value.double()).numpy()
    return [_without_tensors(each) for each in value] if isinstance(value, (list, tuple)) else value
