from __future__ import annotations

import ast
import itertools
import operator
import random
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_lite import countdown
from sage_lite.errors import UserError

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def by_python(expression: str) -> Fraction | None:
    """An expression's value by Python's own parser: shares nothing with the module under test."""

    def walk(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant):
            return Fraction(node.value)
        return OPERATORS[type(node.op)](walk(node.left), walk(node.right))

    try:
        return walk(ast.parse(expression, mode="eval").body)
    except ZeroDivisionError:
        return None


def numbers(expression: str) -> list[int]:
    return sorted(int(token) for token in countdown.tokenize(expression) if token.isdigit())


trees = st.recursive(st.integers(0, 12), lambda inner: st.tuples(st.sampled_from("+-*/"), inner, inner), max_leaves=8)


@given(trees)
def test_render_keeps_the_value_and_parse_reads_it_back(tree):
    text = countdown.render(tree)
    assert countdown.value(countdown.parse(countdown.tokenize(text))) == countdown.value(tree) == by_python(text)


@pytest.mark.parametrize(
    "tree, text",
    [
        (("*", ("+", 3, 5), 7), "(3+5)*7"),
        (("-", 9, ("+", 2, 1)), "9-(2+1)"),
        (("+", 9, ("-", 2, 1)), "9+2-1"),
        (("/", 8, ("*", 2, 2)), "8/(2*2)"),
        (("*", 8, ("/", 2, 2)), "8*2/2"),
        (("-", ("-", 9, 2), 1), "9-2-1"),
        (("*", 2, ("+", 3, 4)), "2*(3+4)"),
    ],
)
def test_render_drops_the_parentheses_that_do_not_matter(tree, text):
    assert countdown.render(tree) == text


@given(trees)
def test_no_pair_of_parentheses_in_a_rendered_expression_can_go(tree):
    text = countdown.render(tree)
    value = by_python(text)
    stack = []
    for i, character in enumerate(text):
        if character == "(":
            stack.append(i)
        elif character == ")":
            start = stack.pop()
            shorter = text[:start] + text[start + 1 : i] + text[i + 1 :]
            # Without them the tree is another one; its value may agree by chance, as in 1*(0+0).
            assert countdown.parse(countdown.tokenize(shorter)) != countdown.parse(countdown.tokenize(text))
    assert countdown.value(tree) == value


@pytest.mark.parametrize("text", ["", "+", "3+", "(3", "3)", "()", "3 5", "3(5)", "-3", "3--5", "3+-5", "3**5", "3//5"])
def test_parse_refuses_what_is_no_expression(text):
    with pytest.raises(ValueError):
        countdown.parse(countdown.tokenize(text))


@pytest.mark.parametrize("text", ["3.5", "03", "1e5", "x", "3_0", "٣", "²", "3!", "a(3)", "3^5", "3%5", "\x00"])
def test_tokenize_refuses_other_characters(text):
    with pytest.raises(ValueError):
        countdown.tokenize(text)


def test_bounds_of_length_depth_and_digits():
    deep = countdown.MAX_DEPTH
    assert countdown.parse(countdown.tokenize("(" * deep + "7" + ")" * deep)) == 7
    with pytest.raises(ValueError, match="nested deeper"):
        countdown.parse(countdown.tokenize("(" * (deep + 1) + "7" + ")" * (deep + 1)))
    assert countdown.tokenize("9" * countdown.MAX_DIGITS)
    with pytest.raises(ValueError, match="digits"):
        countdown.tokenize("9" * (countdown.MAX_DIGITS + 1))
    with pytest.raises(ValueError, match="characters"):
        countdown.tokenize(" " * (countdown.MAX_CHARS + 1))


def test_solutions_are_all_right_and_none_is_missing():
    """Every solution is right, and every right filling of the shapes of three numbers is among them."""
    shapes = ["{}{}{}{}{}", "({}{}{}){}{}", "{}{}({}{}{})"]
    for nums, target in [((3, 5, 7), 22), ((3, 5, 7), 56), ((2, 2, 4), 8), ((1, 1, 1), 1), ((1, 6, 8), 48)]:
        found = set(countdown.solutions(nums, target))
        for text in found:
            assert by_python(text) == target and numbers(text) == sorted(nums), text
        expected = set()
        for a, b, c in itertools.permutations(nums):
            for first, second in itertools.product("+-*/", repeat=2):
                for shape in shapes:
                    text = shape.format(a, first, b, second, c)
                    if by_python(text) == target:
                        expected.add(countdown.render(countdown.parse(countdown.tokenize(text))))
        assert found == expected


def test_solutions_of_four_numbers_and_the_limit():
    found = countdown.solutions([4, 6, 61, 94], 309)
    assert "94*4-61-6" in found and found == sorted(set(found))
    assert all(by_python(text) == 309 and numbers(text) == [4, 6, 61, 94] for text in found)
    assert countdown.solutions([1, 1, 1], 99) == []
    with pytest.raises(UserError, match="6 numbers"):
        countdown.solutions([1] * 6, 6)


def test_random_expressions_use_every_number_once_in_the_same_format():
    rng = random.Random(0)
    texts = [countdown.random_expression([3, 5, 7], rng) for _ in range(500)]
    assert all(numbers(text) == [3, 5, 7] for text in texts)
    assert all(countdown.render(countdown.parse(countdown.tokenize(text))) == text for text in texts)
    assert len(set(texts)) > 100
    again = random.Random(0)
    assert texts == [countdown.random_expression([3, 5, 7], again) for _ in range(500)]


def test_the_problems_are_exactly_the_solvable_ones():
    problems = countdown.problems()
    assert len(problems) == len(set(problems)) == 2144
    known = set(problems)
    for nums in [(1, 1, 1), (1, 2, 9), (3, 5, 7), (9, 9, 9)]:
        for target in range(-5, 120):
            solvable = bool(countdown.solutions(nums, target)) and 1 <= target <= 99
            assert ((nums, target) in known) == solvable


def test_enumeration_is_fast():
    countdown.problems.cache_clear()
    start = time.process_time()
    countdown.problems()
    assert time.process_time() - start < 1.0
