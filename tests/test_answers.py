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
        ("5 millions", None),
        ("3 halves", None),
        ("٣", None),
        ("1/٠", None),
        ("1.٣", None),
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
    + ["٠", "1/٠", "1/0", "३", "５", "²", "^", "{", ":", "x", " or ", " million", r"\pi", "+"]
)


@pytest.mark.parametrize(
    "text, found",
    [
        ("The answer is 5 apples.", "5"),
        ("The answer is 5. I hope it helps 7 people", "5"),
        ("The answer is 5, and 3 are left.", "5"),
        ("The answer is 18 a day", "18"),
        ("The answer is 18 to the nearest dollar", "18"),
        ("The answer is 18 and she is glad", "18"),
        ("The answer is $5 - hope it helps", "$5"),
        ("The answer is 50% of it", "50%"),
        ("The answer is **18** dollars", "18"),
        ("The answer is 20g of sugar", "20"),
        (r"The answer is 18^\circ in the shade", "18"),
        (r"The answer is 18 \text{ clips} in all", "18"),
        ("There are 762 M&M's", "762"),
        ("Ann has 3 and Bob has 5", "5"),
        ("Total is 3*6 = 18 dollars", "18"),
        # parts of a longer answer: all of it
        ("The answer is 5 million dollars.", "5 million dollars"),
        ("The answer is $5$ million dollars.", "$5$ million dollars"),
        ("The total is 2*4 = 8 dozen eggs", "8 dozen eggs"),
        ("The answer is 1e3 dollars", "1e3 dollars"),
        ("The answer is 10^6 dollars", "10^6 dollars"),
        ("It makes 10^6 dollars", "10^6 dollars"),
        ("The answer is 10**6 dollars", "10**6 dollars"),
        ("The answer is 10² dollars", "10² dollars"),
        ("The answer is 5٣ dollars", "5٣ dollars"),
        ("The answer is 2^{10} in total", "2^{10} in total"),
        ("The answer is 1 1/2 cups", "1 1/2 cups"),
        ("She used 1 1/2 cups", "1 1/2 cups"),
        ("The answer is 5x+3 in all", "5x+3 in all"),
        ("They have 5x+3 in all", "5x+3 in all"),
        ("They have x + 3 in all", "They have x + 3 in all"),
        ("The answer is 5k dollars", "5k dollars"),
        ("The answer is 2:30 pm", "2:30 pm"),
        ("She leaves at 2:30 pm", "2:30 pm"),
        ("The answer is 7 or 8.", "7 or 8"),
        ("It is 7 or 8.", "7 or 8"),
        ("The answer is between 10 and 20.", "10 and 20"),
        ("The answer is 10-20 dollars", "10-20 dollars"),
        ("The answer is 10 to 20 dollars", "10 to 20 dollars"),
        ("The answer is 5 and a half dollars", "5 and a half dollars"),
        ("The answer is 5 * 3 dollars", "5 * 3 dollars"),
        (r"The answer is 2\pi units", r"2\pi units"),
        (r"The answer is \frac{3}{4} cups", r"\frac{3}{4} cups"),
        ("The answer is 70{,}000 dollars", "70{,}000 dollars"),
    ],
)
def test_a_number_is_taken_alone_only_where_it_is_the_whole_answer(text, found):
    assert answers.maths_answer(text) == found


@pytest.mark.parametrize(
    "text",
    ["5 million", r"5\text{ million}", "$5$ Million dollars", "7 or 8", r"5~\mbox{dozens}", "10 and 20", "2 pi",
     r"5\,\text{thousand}", r"5\textrm{ million}", r"5\text{-million}", r"5\text{ US million}", r"{5}\text{ million}",
     r"5\mathrm{k}", r"5\text{ M}", "5 mil", "-5 million"],
)  # fmt: skip
def test_a_number_and_a_word_that_changes_it(text):
    assert answers.compound(text)


@pytest.mark.parametrize(
    "text", ["", "5", "-5", r"5\text{ m}", "5 KB", "5 millionaires", "5 orders", "5 apples or 6", "5 tons", "million"]
)
def test_a_number_with_its_unit_is_no_compound(text):
    assert not answers.compound(text)


@given(st.one_of(st.text(), st.lists(pieces, max_size=30).map("".join)))
def test_nothing_a_model_writes_breaks_the_search(completion):
    found = answers.maths_answer(completion)
    assert len(found) <= answers.MAX_ANSWER
    answers.short_answer(completion)
    answers.plain_number(found)
    answers.plain_text(found)
    answers.compound(found)


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
        "1 or ",
        "1 ",
        "1^",
        "5x+",
        "1,,,",
        "5 " + " " * 500,
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
