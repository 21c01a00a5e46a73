"""Countdown arithmetic: parse, evaluate, print and enumerate expressions.

A tree is an ``int`` or a triple ``(operator, left, right)``; values are exact fractions. Nothing here calls ``eval``:
model output is data. What a completion may cost is bounded before any work is done (see ``MAX_CHARS``, ``MAX_DEPTH``,
``MAX_DIGITS``).
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache

from sage_lite.errors import UserError

Tree = int | tuple
Problem = tuple[tuple[int, ...], int]  # (sorted nums, target)

MAX_CHARS = 512  # an expression of four three-digit numbers needs about 20
MAX_DEPTH = 32  # nested parentheses
MAX_DIGITS = 12  # of one number
MAX_ENUMERATED = 5  # numbers: 430,080 trees; six would be 31 million

PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_UNICODE = str.maketrans("×÷−", "*/-")
_TOKEN = re.compile(r"\s*(?:([1-9][0-9]*|0)(?![0-9])|([-+*/()]))\s*")


def tokenize(text: str) -> list[str]:
    """Splits an expression into numbers, operators and parentheses.

    Numbers are plain decimal integers without sign, point or leading zero. ``×``, ``÷`` and ``−`` are read as
    ``*``, ``/`` and ``-``. Raises ``ValueError`` for anything else, and for text beyond the module's bounds.
    """
    if len(text) > MAX_CHARS:
        raise ValueError(f"an expression of {len(text)} characters; at most {MAX_CHARS} are read")
    text = text.translate(_UNICODE)
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"not arithmetic: {text[at : at + 20]!r}")
        token = match[1] or match[2]
        if len(token) > MAX_DIGITS:
            raise ValueError(f"a number of {len(token)} digits; at most {MAX_DIGITS} are read")
        tokens.append(token)
        at = match.end()
    return tokens


def parse(tokens: Sequence[str]) -> Tree:
    """Builds the tree of an expression: the usual precedence, left to right among equals, no unary signs.

    Raises ``ValueError`` when the tokens are no expression, or parentheses nest deeper than ``MAX_DEPTH``.
    """
    position = 0

    def peek() -> str:
        return tokens[position] if position < len(tokens) else ""

    def chain(level: int, depth: int) -> Tree:
        # level 1: terms joined by + and -; level 2: factors joined by * and /
        nonlocal position
        operand = (lambda: chain(2, depth)) if level == 1 else (lambda: factor(depth))
        tree = operand()
        while PRECEDENCE.get(peek()) == level:
            operator = peek()
            position += 1
            tree = (operator, tree, operand())
        return tree

    def factor(depth: int) -> Tree:
        nonlocal position
        token = peek()
        position += 1
        if token.isdigit():
            return int(token)
        if token != "(":
            raise ValueError(f"expected a number or '(' but found {token or 'the end'!r}")
        if depth == MAX_DEPTH:
            raise ValueError(f"parentheses nested deeper than {MAX_DEPTH}")
        tree = chain(1, depth + 1)
        if peek() != ")":
            raise ValueError(f"expected ')' but found {peek() or 'the end'!r}")
        position += 1
        return tree

    tree = chain(1, 0)
    if position != len(tokens):
        raise ValueError(f"expected an operator but found {peek()!r}")
    return tree


def apply(operator: str, left: Fraction, right: Fraction) -> Fraction | None:
    """``left operator right``; ``None`` for a division by zero."""
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    return left / right if right else None


def value(tree: Tree) -> Fraction | None:
    """The exact value of a tree; ``None`` if it divides by zero anywhere."""
    if isinstance(tree, int):
        return Fraction(tree)
    operator, left, right = tree
    left, right = value(left), value(right)
    return None if left is None or right is None else apply(operator, left, right)


def render(tree: Tree) -> str:
    """Writes a tree with as few parentheses as keep its value: ``(3+5)*7``, ``9-(2+1)``, ``1+2+3``."""
    if isinstance(tree, int):
        return str(tree)
    operator, left, right = tree
    return _operand(left, operator, False) + operator + _operand(right, operator, True)


def _operand(tree: Tree, parent: str, on_the_right: bool) -> str:
    if isinstance(tree, int):
        return str(tree)
    below = PRECEDENCE[tree[0]] - PRECEDENCE[parent]
    # a-(b+c) and a/(b*c) change without their parentheses; a+(b-c) and a*(b/c) do not
    needed = below < 0 or (below == 0 and on_the_right and parent in "-/")
    return f"({render(tree)})" if needed else render(tree)


def _valued_trees(nums: tuple[int, ...]) -> Iterator[tuple[Fraction, Tree]]:
    """Every tree whose leaves are ``nums`` in this order, with its value; trees that divide by zero left out."""
    if len(nums) == 1:
        yield Fraction(nums[0]), nums[0]
        return
    for cut in range(1, len(nums)):
        rights = list(_valued_trees(nums[cut:]))
        for left, left_tree in _valued_trees(nums[:cut]):
            for right, right_tree in rights:
                for operator in PRECEDENCE:
                    result = apply(operator, left, right)
                    if result is not None:
                        yield result, (operator, left_tree, right_tree)


def _enumerate(nums: Sequence[int]) -> Iterator[tuple[Fraction, Tree]]:
    if not 1 <= len(nums) <= MAX_ENUMERATED:
        raise UserError(f"cannot enumerate expressions of {len(nums)} numbers; give 1 to {MAX_ENUMERATED}")
    for order in sorted(set(itertools.permutations(nums))):
        yield from _valued_trees(order)


@lru_cache(maxsize=4096)
def _solutions(nums: tuple[int, ...], target: int) -> tuple[str, ...]:
    return tuple(sorted({render(tree) for result, tree in _enumerate(nums) if result == target}))


def solutions(nums: Sequence[int], target: int) -> list[str]:
    """All distinct expressions (as ``render`` writes them) that use each number once and equal ``target``; sorted.

    Raises ``UserError`` for more than ``MAX_ENUMERATED`` numbers.
    """
    return list(_solutions(tuple(sorted(nums)), target))


def random_expression(nums: Sequence[int], rng: random.Random) -> str:
    """A random expression that uses each number once, in the format of ``solutions``; its value may be anything."""

    def grow(leaves: Sequence[int]) -> Tree:
        if len(leaves) == 1:
            return leaves[0]
        cut = rng.randrange(1, len(leaves))
        return (rng.choice("+-*/"), grow(leaves[:cut]), grow(leaves[cut:]))

    return render(grow(rng.sample(list(nums), len(nums))))


@lru_cache(maxsize=8)
def problems(count: int = 3, low: int = 1, high: int = 9, max_target: int = 99) -> tuple[Problem, ...]:
    """Every solvable problem, as ``(sorted nums, target)``: ``count`` numbers in [low, high], targets 1..max_target."""
    found = []
    for nums in itertools.combinations_with_replacement(range(low, high + 1), count):
        values = {result for result, _ in _enumerate(nums)}
        found += [(nums, target) for target in range(1, max_target + 1) if target in values]
    return tuple(found)
