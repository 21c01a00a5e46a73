"""Group advantages: SAGE's one line, and its relatives.

Every function maps `rewards[..., M]` to `advantages[..., M]`: the last axis is the group, the M rollouts of one
prompt. All of them compute in float32, or in float64 when the rewards are float64 or whole numbers beyond float32's
exact ones; the result is detached. All raise `UserError` (a ValueError) for a reward that is NaN or infinite, for
rewards without a group axis or with an empty one, and for a parameter out of range.

Where the advantages of a group must sum to zero (all but `reinforce` and `sign`), a group with equal rewards, and so
every group of one, gives exact zeros.
"""
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sage_lite.checks import number, real_tensor, reward_groups, shown, std_ddof, symmetric, within
from sage_lite.errors import UserError

Advantage = Callable[..., Tensor]
_REGISTRY: dict[str, Advantage] = {}
_BUILT_IN: frozenset[str] = frozenset()


def register(name: str, function: Advantage | None = None) -> Any:
    """Make `function(rewards[..., M], **parameters)` available as `get(name)`; without `function`, a decorator.

    A name of your own may be registered again (a notebook cell is run twice); a built-in one raises UserError.
    """
    if function is None:
        return functools.partial(register, name)
    if not isinstance(name, str) or not name:
        raise UserError(f"an advantage's name must be a non-empty string, got {name!r}")
    if name in _BUILT_IN:
        raise UserError(f"{name!r} is a built-in advantage: choose another name for your own")
    if not callable(function):
        raise UserError(f"advantage {name!r} must be a function of rewards[..., M], got {function!r}")
    _REGISTRY[name] = function
    return function


def names() -> tuple[str, ...]:
    """Names that `get` knows, in the order in which they were registered."""
    return tuple(_REGISTRY)


def get(name: str, **parameters: Any) -> Advantage:
    """The advantage called `name` with its parameters fixed: a callable `rewards[..., M] -> advantages[..., M]`.

    Raises UserError for an unknown name or parameter, and at once for a parameter out of range.
    """
    if not isinstance(name, str) or name not in _REGISTRY:
        raise UserError(f"unknown advantage {name!r}; known: {', '.join(names())}")
    function = _REGISTRY[name]
    if not parameters:
        return functools.partial(function)
    try:
        accepted = list(inspect.signature(function).parameters.values())[1:]
    except (TypeError, ValueError):
        raise UserError(f"advantage {name!r} does not tell its parameters, got {function!r} with {parameters!r}: "
                        "register a Python function that names them") from None
    if not any(p.kind is p.VAR_KEYWORD for p in accepted):
        allowed = [p.name for p in accepted if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for parameter in parameters:
            if parameter not in allowed:
                raise UserError(f"advantage {name!r} has no parameter {parameter!r}; "
                                + (f"it takes: {', '.join(allowed)}" if allowed else "it takes none"))
    function(torch.tensor([0.0, 1.0]), **parameters)  # a bad value fails here, not after an hour of sampling
    return functools.partial(function, **parameters)


def apply(advantage: str | Advantage, rewards: Tensor) -> Tensor:
    """Advantages of `rewards[..., M]` by a name or by any function, a reader's own included: detached and checked.

    The function gets a copy of the rewards, as finite floats; it may return a numpy array. The result has the rewards'
    shape, device and float type. Raises UserError where it has another shape or is not finite.
    """
    function = get(advantage) if isinstance(advantage, str) else advantage
    if not callable(function):
        raise UserError(f"an advantage must be a name or a function of rewards[..., M], got {function!r}")
    r = reward_groups(rewards)
    result = function(r.clone())  # a copy: the function may work in place
    try:
        a = torch.as_tensor(result).detach()
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"an advantage must return a tensor of the shape of its rewards, got {result!r}") from None
    if a.shape != r.shape or a.is_complex():
        raise UserError(f"an advantage must return one real number a rollout, got shape {tuple(a.shape)} and {a.dtype} "
                        f"for rewards of shape {tuple(r.shape)}; as in r - r.mean(-1, keepdim=True)")
    a = a.to(r)
    if not a.sum().isfinite() and not a.isfinite().all():
        group = tuple((~a.isfinite()).nonzero()[0].tolist())[:-1]
        raise UserError(f"the advantage is {a[group][~a[group].isfinite()][0]:g} for the group of rewards "
                        f"{shown(r[group])}: guard its divisions, where a group's rewards are equal or sum to 0")
    return a


def apply_symmetric(advantage: str | Advantage, groups: Tensor) -> Tensor:
    """`apply`; UserError also where a group's advantages depend on the order of its rollouts or on other groups."""
    a = apply(advantage, groups)
    symmetric(functools.partial(apply, advantage), groups.flatten(0, -2), a.flatten(0, -2))
    return a


@register("sage")
def sage(rewards: Tensor, tau: float = 0.1) -> Tensor:
    """SAGE (SoftmaxGRPO): A = M * softmax(rewards / tau) - 1, in [-1, M - 1], sum zero.

    `tau` > 0 is the temperature, in units of reward: small favours the best rollout, large tends to (r - mean) / tau.
    Source: SAGE, arXiv 2608.09271.
    """
    r = reward_groups(rewards)
    tau = number("tau", tau, above=0.0)
    # The same line without overflow at tau = 1e-20 and without cancellation at tau = 1e6:
    # with e = exp((r - max) / tau), M * softmax - 1 = (e - mean e) / mean e, and e - mean e = u - mean u for u = e - 1.
    x = (r - r.amax(-1, keepdim=True)) / max(tau, torch.finfo(r.dtype).tiny)
    e, u = x.exp(), x.expm1()
    close = x.amin(-1, keepdim=True) > -1.0  # all e near 1: only u still has their differences
    gap = torch.where(close, u - u.mean(-1, keepdim=True), e - e.mean(-1, keepdim=True))
    return (gap / e.mean(-1, keepdim=True)).clamp(-1.0, r.shape[-1] - 1.0)  # the bounds, to the last bit


@register("grpo")
def grpo(rewards: Tensor, eps: float = 1e-4, ddof: int = 0) -> Tensor:
    """GRPO: A = (rewards - mean) / (std + eps), sum zero.

    `eps` >= 0 is in units of reward; `ddof` 0 is the population std, 1 the sample std (the M - 1 of `torch.std`).
    Source: DeepSeekMath, arXiv 2402.03300.
    """
    d = _centred(reward_groups(rewards))
    eps = number("eps", eps, at_least=0.0)
    ddof = std_ddof(ddof)
    scale = d.abs().amax(-1, keepdim=True)  # squares of tiny or huge gaps would leave the range of a float32
    std = scale * ((d / scale).square().sum(-1, keepdim=True) / max(d.shape[-1] - ddof, 1)).sqrt()
    return torch.where(scale > 0, d / (std + eps), 0.0)


@register("dr_grpo")
def dr_grpo(rewards: Tensor) -> Tensor:
    """Dr. GRPO: A = rewards - mean, sum zero. Source: arXiv 2503.20783."""
    return _centred(reward_groups(rewards))


@register("rloo")
def rloo(rewards: Tensor) -> Tensor:
    """RLOO: A = reward - mean of the other M - 1 rewards = M / (M - 1) * (rewards - mean), sum zero.

    Source: arXiv 2402.14740.
    """
    d = _centred(reward_groups(rewards))
    return d * (d.shape[-1] / max(d.shape[-1] - 1, 1))


@register("reinforce")
def reinforce(rewards: Tensor, baseline: float = 0.0) -> Tensor:
    """REINFORCE: A = rewards - baseline, with a constant `baseline` in units of reward. Source: Williams (1992).

    It does not compare rollouts with each other: its sum is free, and a constant group or a group of one keeps its
    signal (the baseline is not taken from the group, so there is nothing to cancel).
    """
    return reward_groups(rewards) - number("baseline", baseline)


@register("maxrl")
def maxrl(rewards: Tensor) -> Tensor:
    """MaxRL: A = rewards / mean - 1, sum zero; zeros where the mean is 0. The limit of SAGE on 0/1 rewards, tau -> 0.

    Raises UserError for a negative reward: a negative mean would turn the sign of the update. Source: MaxRL.
    """
    r = reward_groups(rewards)
    within(r, "maxrl divides by the group's mean reward and needs rewards >= 0", 0.0)
    mean = r.mean(-1, keepdim=True)
    return torch.where(mean > 0, _centred(r) / mean, 0.0)


@register("sign")
def sign(rewards: Tensor) -> Tensor:
    """Sign: A = 2 * rewards - 1, so +1 for a success and -1 for a failure.

    It equals REINFORCE with baseline 1/2, doubled. Like it, it looks at one rollout at a time: its sum is free and an
    all-success or all-failure group keeps its signal.
    """
    return 2.0 * reward_groups(rewards) - 1.0


@register("focal_grpo")
def focal_grpo(rewards: Tensor, gamma: float = 1.0, eps: float = 1e-4, ddof: int = 0) -> Tensor:
    """F-GRPO: A = (1 - k / M)^gamma * GRPO's advantage, sum zero; k = successes of the group, `gamma` >= 0.

    Rewards between 0 and 1 count by their size: the success share k / M is the group's mean reward. Raises UserError
    for a reward outside [0, 1]. `eps` and `ddof` as in `grpo`. Source: F-GRPO.
    """
    r = reward_groups(rewards)
    gamma = number("gamma", gamma, at_least=0.0)
    within(r, "focal_grpo takes the group's mean reward for its success share and needs rewards in [0, 1]", 0.0, 1.0)
    failure_share = (1.0 - r).mean(-1, keepdim=True)
    return failure_share**gamma * grpo(r, eps=eps, ddof=ddof)


def _centred(r: Tensor) -> Tensor:
    """`r - mean`; the maximum goes first, so that equal rewards give exact zeros and a large offset does no harm."""
    d = r - r.amax(-1, keepdim=True)
    return d - d.mean(-1, keepdim=True)


_BUILT_IN = frozenset(_REGISTRY)


def grouped(advantage: str | Advantage, rewards: Tensor | Sequence[float | None], group_ids: Sequence[Any] | Tensor,
            *, nan_is_missing: bool = False, group_size: int | None = None) -> Tensor:
    """Advantages `[N]` of N rollouts whose groups are told by id: ragged and interleaved groups allowed.

    `rewards[N]`: a tensor, an array or a list. None in a list is a missing reward (a failed grader), and so is NaN if
    `nan_is_missing`. A missing rollout gets 0 and its group is computed as if it had never been sampled.
    `group_ids[N]`: anything hashable. One id per *prompt drawn*, not per text: a prompt drawn twice is two groups.
    `group_size`, when given, is demanded of every id (missing rewards counted).

    Raises UserError as `apply` does, if lengths differ, if an id has another count than `group_size`, and if every one
    of several ids occurs once (ids made per rollout: nothing could be learnt); pass group_size=1 where you mean that.
    """
    function = get(advantage) if isinstance(advantage, str) else advantage
    try:
        ids = group_ids.tolist() if hasattr(group_ids, "tolist") else list(group_ids)
        groups: dict[Any, list[int]] = {group: [] for group in ids}
    except TypeError:
        raise UserError("group_ids[N] must be one id a rollout, each a number, a text or else hashable, "
                        f"got {group_ids!r}") from None
    missing: set[int] = set()
    if hasattr(rewards, "__iter__") and getattr(rewards, "dtype", "O") == "O":  # a list, an array of objects
        missing = {i for i, reward in enumerate(rewards) if reward is None}
        rewards = [0.0 if reward is None else reward for reward in rewards]
    rewards = real_tensor(rewards)
    if nan_is_missing:
        missing |= set(rewards.isnan().reshape(-1).nonzero()[:, 0].tolist())
        rewards = torch.where(rewards.isnan(), 0, rewards)  # an infinite reward stays an error
    r = reward_groups(rewards)
    if r.shape != (len(ids),):
        raise UserError(f"rewards[N] and group_ids[N] must have one entry a rollout, "
                        f"got shape {tuple(r.shape)} and {len(ids)} ids")
    for i, group in enumerate(ids):
        groups[group].append(i)
    for group, members in groups.items():
        if group_size is not None and len(members) != group_size:
            raise UserError(f"group id {group!r} has {len(members)} rollouts instead of {group_size}: "
                            "give every prompt drawn its own id (a prompt drawn twice is two groups)")
    if group_size is None and len(ids) > 1 and len(groups) == len(ids):
        raise UserError(f"each of the {len(ids)} group ids occurs once (first: {ids[0]!r}): they look like ids per "
                        "rollout; give the rollouts of one prompt the same id")
    by_size: dict[int, list[list[int]]] = {}  # groups of one size are computed together
    for members in groups.values():
        live = [i for i in members if i not in missing]
        by_size.setdefault(len(live), []).append(live)
    by_size.pop(0, None)
    out = torch.zeros_like(r)
    for same_size in by_size.values():
        index = torch.tensor(same_size, device=r.device)
        out[index] = apply(function, r[index])
    return out
