"""Rewards: a completion in, a number out.

Exact rewards are 0.0 or 1.0. All of them read only the answer part of a completion (``answer_text``), and all have a
bounded cost whatever a model writes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from . import countdown as arithmetic
from .errors import UserError

MAX_COMPLETION = 1_000_000  # characters; far beyond any token budget here. Longer ones hold no answer.


def without_thinking(completion: str) -> str:
    """What follows the last ``</think>``; the whole text if nothing was thought; "" for a thought never closed.

    The opening ``<think>`` may be missing, because some chat templates put it into the prompt. Raises ``UserError``
    if the completion is not a string.
    """
    if not isinstance(completion, str):
        raise UserError(f"a completion must be a string, not {type(completion).__name__}: {completion!r:.80}")
    if len(completion) > MAX_COMPLETION:
        return ""
    _, closed, rest = completion.rpartition("</think>")
    if closed:
        return rest
    return "" if "<think>" in completion else completion


def answer_text(completion: str) -> str:
    """The answer in a completion, stripped.

    Thinking is dropped (``without_thinking``). Of the rest, the inside of the last complete
    ``<answer>…</answer>``; without one, the last line that is not empty, which for a bare answer is all of it.
    """
    text = without_thinking(completion)
    head, closed, _ = text.rpartition("</answer>")
    _, opened, inside = head.rpartition("<answer>")
    if closed and opened:
        return inside.strip()
    return text.rstrip().rpartition("\n")[2].strip()


def countdown(completion: str, nums: Sequence[int], target: int) -> float:
    """1.0 if the answer is an expression that uses each of ``nums`` exactly once and equals ``target``, else 0.0.

    The answer (``answer_text``) may hold plain integers, ``+ - * /`` (also ``× ÷ −``), parentheses and spaces, and may end
    in ``= target`` (an integer, which must be the target). Not accepted: a sign before a number or a parenthesis (``-3+5``: the
    number given is 3, not −3), points, leading zeros, ``**``, ``//``, implied products, words. Arithmetic is exact; a
    division by zero scores 0.

    Raises ``UserError`` if the completion is not a string, or ``nums`` and ``target`` are not integers.
    """
    nums, target = integers(nums), integers([target])[0]
    expression, equals, tail = answer_text(completion).partition("=")
    if equals and tail.strip().replace("−", "-") != str(target):
        return 0.0
    try:
        tokens = arithmetic.tokenize(expression)
        # Compared before anything is computed: no other numbers, and no more of them, are ever calculated with.
        if sorted(int(token) for token in tokens if token.isdigit()) != sorted(nums):
            return 0.0
        return float(arithmetic.value(arithmetic.parse(tokens)) == target)
    except ValueError:
        return 0.0


def integers(values: Sequence[int]) -> list[int]:
    """The values as Python integers (NumPy's are fine). Raises ``UserError`` for anything else, booleans included."""
    try:
        if any(isinstance(value, bool) for value in values):
            raise TypeError
        return [operator.index(value) for value in values]
    except TypeError:
        raise UserError(f"countdown needs whole numbers for nums and target, not {values!r:.80}") from None
