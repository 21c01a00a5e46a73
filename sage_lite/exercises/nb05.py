"""Exercises of notebook 05: LoRA's weights, nf4's bits, what training keeps in memory, merging, KL to the base."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from sage_lite.exercises import agree, exercise
from sage_lite.losses import kl_k3

# -- 05.1 ----------------------------------------------------------------------------------------------------------

Shapes = Sequence[tuple[int, int]]


def _lora_weights(shapes: Shapes, rank: int) -> int:
    return sum(rank * (rows + columns) for rows, columns in shapes)


def _lora_weights_of_matrices(shapes: Shapes, rank: int) -> int:
    """The same by building A [rank, in] and B [out, rank] without content, and counting."""
    with torch.device("meta"):
        pairs = [(torch.empty(rank, columns), torch.empty(rows, rank)) for rows, columns in shapes]
    return sum(a.numel() + b.numel() for a, b in pairs)


_COUNT_MISTAKES = {
    "those are the weights of the matrices themselves": lambda shapes, rank: sum(a * b for a, b in shapes),
    "that counts only A, which has `in` columns; B has `out` rows": lambda shapes, r: sum(r * b for _, b in shapes),
    "that counts only B, which has `out` rows; A has `in` columns": lambda shapes, r: sum(r * a for a, _ in shapes),
    "A has rank rows and B rank columns: each counts rank times": lambda shapes, rank: sum(a + b for a, b in shapes),
}


@exercise("05.1", "Count LoRA's weights", difficulty=1, minutes=5, solution=_lora_weights,
          wrong=[(wrong, message) for message, wrong in _COUNT_MISTAKES.items()])
def _check_lora_weights(answer) -> None:
    cases = [([(128, 128)], 4), ([(128, 64), (512, 128)], 16), ([(1536, 1536), (256, 1536), (8960, 1536)], 8)]
    agree(answer, _lora_weights_of_matrices, cases, names=["shapes", "rank"], mistakes=_COUNT_MISTAKES)


# -- 05.2 ----------------------------------------------------------------------------------------------------------


def _bits_per_weight(block: int, second_block: int) -> float:
    return 4 + 8 / block + 32 / (block * second_block)


def _bits_counted(block: int, second_block: int) -> float:
    """The same by counting all bits of one second block."""
    weights = block * second_block
    return (4 * weights + 8 * second_block + 32) / weights


_BITS_MISTAKES = {
    "that is single quantisation, with a 32-bit scale for each block": lambda b, s: 4 + 32 / b,
    "block * second_block weights share a 32-bit scale": lambda b, s: 4 + 8 / b + 32 / s,
    "the scales need bits, too": lambda b, s: 4.0,
    "the scales of the scales need bits, too": lambda b, s: 4 + 8 / b,
    "that is bytes; the question is for bits": lambda b, s: _bits_per_weight(b, s) / 8,
}


@exercise("05.2", "How many bits are 4 bits?", difficulty=1, minutes=5, solution=_bits_per_weight,
          wrong=[(wrong, message) for message, wrong in _BITS_MISTAKES.items()])
def _check_bits_per_weight(answer) -> None:
    cases = [(64, 256), (128, 256), (64, 16), (32, 64)]
    agree(answer, _bits_counted, cases, names=["block", "second_block"], mistakes=_BITS_MISTAKES, rtol=1e-5)


# -- 05.3 ----------------------------------------------------------------------------------------------------------


def _merged(weight: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    return weight + alpha / a.shape[0] * b @ a


def _merged_by_columns(weight: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """The same from what a LoRA layer computes, `x W' + (alpha/r) (x A') B'`, on the unit vectors."""
    x = torch.eye(weight.shape[1], dtype=weight.dtype)
    return (x @ weight.T + (alpha / a.shape[0]) * ((x @ a.T) @ b.T)).T


_MERGE_MISTAKES = {
    "the update is scaled by alpha / rank; rank is the number of A's rows": lambda w, a, b, alpha: w + b @ a,
    "divide alpha by the rank": lambda w, a, b, alpha: w + alpha * b @ a,
    "that is rsLoRA's scale; the usual one is alpha / rank": lambda w, a, b, alpha: w + alpha / len(a) ** 0.5 * b @ a,
    "that is the update alone: add it to the weight": lambda w, a, b, alpha: alpha / len(a) * b @ a,
}


@exercise("05.3", "Merge an adapter into its matrix", difficulty=2, minutes=10, solution=_merged,
          wrong=[(wrong, message) for message, wrong in _MERGE_MISTAKES.items()])
def _check_merged(answer) -> None:
    cases = []
    for seed, (rows, columns, rank, alpha) in enumerate([(3, 2, 1, 2.0), (4, 5, 4, 8.0), (6, 3, 2, 32.0)]):
        g = torch.Generator().manual_seed(seed)
        shapes = [(rows, columns), (rank, columns), (rows, rank)]
        cases.append((*(torch.randn(*shape, generator=g) for shape in shapes), alpha))
    agree(answer, _merged_by_columns, cases, names=["W", "A", "B", "alpha"], mistakes=_MERGE_MISTAKES)


# -- 05.4 ----------------------------------------------------------------------------------------------------------


class _ToyPolicy:
    """A policy whose model is a shift of log-probabilities, present while its adapter is on."""

    def __init__(self, logprobs: Tensor, shift: Tensor):
        self.base, self.shift, self.adapter = logprobs, shift, True
        self.causal_lm = SimpleNamespace(policy=self)

    def __repr__(self) -> str:
        return f"a policy whose adapter shifts by {self.shift[0].tolist()} in the first row"

    @contextlib.contextmanager
    def reference(self) -> Iterator[SimpleNamespace]:
        self.adapter = False
        try:
            yield self.causal_lm
        finally:
            self.adapter = True


def _toy_logprobs(model: SimpleNamespace) -> Tensor:
    return model.policy.base + (model.policy.shift if model.policy.adapter else 0.0)


def _reference_kl(policy, logprobs: Callable, mask: Tensor) -> Tensor:
    with policy.reference() as base:
        reference = logprobs(base)
    log_ratio = reference - logprobs(policy.causal_lm)
    return ((log_ratio.exp() - log_ratio - 1) * mask).sum() / mask.sum()


def _library_kl(policy, logprobs: Callable, mask: Tensor) -> Tensor:
    """kl_k3 on the toy's own numbers, without its switch."""
    kl = kl_k3(policy.base + policy.shift, policy.base)
    return kl[mask].mean()


def _with_log_ratio(of: Callable[[Tensor, Tensor], Tensor]) -> Callable:
    def mistaken(policy, logprobs: Callable, mask: Tensor) -> Tensor:
        with policy.reference() as base:
            reference = logprobs(base)
        return of(reference - logprobs(policy.causal_lm), mask)

    return mistaken


def _adapter_still_off(policy, logprobs: Callable, mask: Tensor) -> Tensor:
    with policy.reference() as base:
        log_ratio = logprobs(base) - logprobs(policy.causal_lm)
    return ((log_ratio.exp() - log_ratio - 1) * mask).sum() / mask.sum()


_KL_MISTAKES = {
    "both are the base's: take the policy's own outside of `with policy.reference()`": _adapter_still_off,
    "the sign: k3 is exp(d) - d - 1 with d = reference - policy": _with_log_ratio(
        lambda d, mask: (((-d).exp() + d - 1) * mask).sum() / mask.sum()),
    "dead tokens count: multiply by the mask": _with_log_ratio(
        lambda d, mask: (d.exp() - d - 1).sum() / mask.sum()),
    "divide by the live tokens, not by all of them": _with_log_ratio(
        lambda d, mask: ((d.exp() - d - 1) * mask).mean()),
    "that is the plain estimate -d, which may be negative; k3 is exp(d) - d - 1": _with_log_ratio(
        lambda d, mask: (-d * mask).sum() / mask.sum()),
}


@exercise("05.4", "KL to the model without its adapter", difficulty=3, minutes=15, solution=_reference_kl,
          wrong=[(wrong, message) for message, wrong in _KL_MISTAKES.items()])
def _check_reference_kl(answer) -> None:
    cases = []
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        policy = _ToyPolicy(-torch.rand(3, 4, generator=g) - 1, torch.randn(3, 4, generator=g) / 2)
        mask = torch.arange(4) < torch.randint(1, 4, (3, 1), generator=g)
        cases.append((policy, _toy_logprobs, mask))
    agree(answer, _library_kl, cases, names=["policy", "logprobs", "mask"], mistakes=_KL_MISTAKES)


# -- 05.5 ----------------------------------------------------------------------------------------------------------


def _training_bytes(frozen: int, frozen_bits: float, trained: int) -> float:
    return frozen * frozen_bits / 8 + trained * 16


def _training_bytes_in_parts(frozen: int, frozen_bits: float, trained: int) -> float:
    weight = gradient = first_moment = second_moment = torch.float32.itemsize
    return frozen_bits * frozen / 8 + trained * (weight + gradient + first_moment + second_moment)


_BYTES_MISTAKES = {
    "Adam keeps two moments for each trained weight, 4 bytes each": lambda f, bits, t: f * bits / 8 + t * 8,
    "Adam keeps two moments, not one": lambda f, bits, t: f * bits / 8 + t * 12,
    "frozen weights have no gradient and no moments": lambda f, bits, t: f * (bits / 8 + 12) + t * 16,
    "frozen_bits are bits, a byte has eight": lambda f, bits, t: f * bits + t * 16,
    "the frozen weights must be there as well": lambda f, bits, t: t * 16,
}


@exercise("05.5", "What must always be in memory", difficulty=2, minutes=10, solution=_training_bytes,
          wrong=[(wrong, message) for message, wrong in _BYTES_MISTAKES.items()])
def _check_training_bytes(answer) -> None:
    cases = [(0, 32, 1000), (1_000_000, 16, 20_000), (1_000_000, 4.127, 20_000), (5_000, 32, 0)]
    agree(answer, _training_bytes_in_parts, cases, names=["frozen", "frozen_bits", "trained"], mistakes=_BYTES_MISTAKES)
