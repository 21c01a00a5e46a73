from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sage_lite import answers
from sage_lite.errors import UserError


@pytest.mark.parametrize(
    "completion, rest",
    [
        ("no thought", "no thought"),
        ("<think>a</think>b", "b"),
        ("a, the template opened it</think>b", "b"),
        ("<think>a</think>b<think>c</think>d", "d"),
        ("<think>never closed: 3+5", ""),
        ("", ""),
    ],
)
def test_without_thinking(completion, rest):
    assert answers.without_thinking(completion) == rest


@pytest.mark.parametrize("completion", [None, 3, b"3", ["3"]])
def test_a_completion_must_be_a_string(completion):
    with pytest.raises(UserError, match="must be a string"):
        answers.without_thinking(completion)


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("3+5", "3+5"),
        ("  3+5 \n\n", "3+5"),
        ("I add them.\n3+5\n", "3+5"),
        ("<answer>3+5</answer>", "3+5"),
        ("<answer>1</answer> no: <answer>\n3+5\n</answer> bye", "3+5"),
        ("<think><answer>1</answer></think>3+5", "3+5"),
        ("<answer>3+5", "<answer>3+5"),
    ],
)
def test_short_answer(completion, answer):
    assert answers.short_answer(completion) == answer


@pytest.mark.parametrize(
    "text, inside",
    [
        (r"\boxed{72}", "72"),
        (r"\boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\text{a {b} c}}", r"\text{a {b} c}"),
        ("72", None),
        (r"\boxed{72", ""),
        (r"\boxed{" + "9" * 600 + "}", ""),
    ],
)
def test_boxed(text, inside):
    assert answers.boxed(text) == inside


@pytest.mark.parametrize(
    "text, value",
    [
        ("72", 72),
        ("$1,080", 1080),
        ("-$5", -5),
        ("−3", -3),
        ("0.50", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("1/3", Fraction(1, 3)),
        ("72 clips", 72),
        (r"72\text{ clips}", 72),
        (r"10,\!080", 10080),
        ("70{,}000", 70000),
        ("18 square meters", 18),
        ("1,2", None),
        ("5 million", None),
        ("5 or", None),
        ("2 pi", None),
        ("2x", None),
        ("72%", None),
        ("1/0", None),
        ("", None),
        ("$", None),
        ("1 2", None),
        (r"\frac12", None),
    ],
)
def test_plain_number(text, value):
    assert answers.plain_number(text) == value


pieces = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        r"\boxed{",
        "}",
        "####",
        "answer is ",
        "Answer:",
        "$",
        "$$",
        r"\(",
        r"\)",
    ]
    + ["=", " ", "\n", "1,000", "3.5", "-7", "/", "*", ".", "clips", r"\frac{1}{2}", r"\text{", "é", "\x00", "%"]
)


@given(st.one_of(st.text(), st.lists(pieces, max_size=30).map("".join)))
def test_nothing_a_model_writes_breaks_the_search(completion):
    found = answers.maths_answer(completion)
    assert len(found) <= answers.MAX_ANSWER
    answers.short_answer(completion)
    answers.plain_number(found)
    answers.plain_text(found)


@pytest.mark.parametrize(
    "unit",
    [
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        r"\boxed{",
        "answer is ",
        "answer ",
        "$",
        "$a ",
        r"\(",
        "=",
        "= 1",
        "1,",
        " ",
        "\n",
        "1/",
        "-",
    ],
)
def test_long_completions_are_searched_in_linear_time(unit):
    """A quadratic search of a million characters would take hours."""
    completion = unit * (answers.MAX_COMPLETION // len(unit))
    start = time.process_time()
    answers.maths_answer(completion)
    answers.short_answer(completion)
    assert time.process_time() - start < 3.0


def test_a_plain_number_is_read_fast_whatever_stands_around_it():
    start = time.process_time()
    for text in ("$" + " " * 480 + "x", "1" + " ab" * 160 + "!", "9" * 500, "1" + ",111" * 120 + "x", "- " * 250):
        answers.plain_number(text)
    assert time.process_time() - start < 2.0
