from __future__ import annotations

import json
import math
import random
import re
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_countdown import by_python, numbers

from sage_lite import answers, rewards
from sage_lite import countdown as arithmetic
from sage_lite.bounded import GraderError as bounded_error
from sage_lite.bounded import ask as bounded_ask
from sage_lite.errors import UserError

# ---- Countdown


@pytest.mark.parametrize(
    "completion",
    [
        "(3+5)*7",
        " ( 3 + 5 ) * 7 ",
        "7×(5+3)",
        "((3+5)*((7)))",
        "(3+5)*7=56",
        "(3+5)*7 = 56 ",
        "I try 3*5+7.\n\n(3+5)*7\n",
        "<think>3*5+7=22</think>(3+5)*7",
        "3*5+7=22, the template opened it</think>\n(3+5)*7",
        "<answer>3+5+7</answer> no, <answer>\n(3+5)*7\n</answer> that is it.",
    ],
)
def test_countdown_accepts(completion):
    assert rewards.countdown(completion, [3, 5, 7], 56) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "56",
        "3*5+7",  # another value
        "(3+5)*7=55",  # a wrong claim
        "(3+5)*7=56=56",
        "56=(3+5)*7",
        "(3+5)*7=",
        "(3+5)*7=56.0",
        "(3+5)*7*1",  # a number too many
        "8*7",  # numbers not given
        "(3+5)*7+7-7",  # a number twice
        "(3+5)7",
        "3+5*7 = 56",  # precedence
        "(3+5)*7/0",
        "-(3+5)*-7",
        "+(3+5)*7",
        "(03+5)*7",
        "(3.0+5)*7",
        "(3+5)*7 is it",
        "the answer is (3+5)*7",
        "<think>(3+5)*7",
        "<answer>(3+5)*7",
        "<think><answer>(3+5)*7</answer></think>",
        "(3+5)*7</think>",
        "(٣+5)*7",
        "(3+5)**7",
        "(3+5)//7",
        "[3+5]*7",
    ],
)
def test_countdown_refuses(completion):
    assert rewards.countdown(completion, [3, 5, 7], 56) == 0.0


def test_countdown_is_exact():
    assert rewards.countdown("8/(3-8/3)", [8, 3, 8, 3], 24) == 1.0
    assert rewards.countdown("1/3*3", [1, 3, 3], 1) == 1.0
    # 10^11 apart from an integer by 10^-11: equal in double precision, not exactly.
    assert rewards.countdown("99999999999-1/99999999999", [99999999999, 1, 99999999999], 99999999999) == 0.0
    assert rewards.countdown("1/(5-5)", [1, 5, 5], 0) == 0.0
    assert rewards.countdown("0/(5-5)", [0, 5, 5], 0) == 0.0
    assert rewards.countdown("3−5=−2", [3, 5], -2) == 1.0


def test_countdown_counts_equal_numbers_as_often_as_they_are_given():
    assert rewards.countdown("5+5", [5, 5], 10) == 1.0
    assert rewards.countdown("5*2", [5, 5], 10) == 0.0
    assert rewards.countdown("5+5", [5, 5, 5], 10) == 0.0


def test_every_solution_scores_one_and_wrong_expressions_zero():
    rng = random.Random(0)
    scored = Counter()
    for nums, target in rng.sample(arithmetic.problems(), 150):
        for text in arithmetic.solutions(nums, target):
            assert rewards.countdown(text, nums, target) == 1.0, text
            assert rewards.countdown(f"{text} = {target}", nums[::-1], target) == 1.0
        for _ in range(10):
            text = arithmetic.random_expression(nums, rng)
            right = by_python(text) == target and numbers(text) == sorted(nums)
            assert rewards.countdown(text, nums, target) == float(right), text
            scored[right] += 1
        other = arithmetic.random_expression([*nums[:-1], nums[-1] + 10], rng)
        assert rewards.countdown(other, nums, target) == 0.0
    assert scored[True] > 10 and scored[False] > 1000


@pytest.mark.parametrize(
    "completion",
    [
        "9**9**9",
        "9**9**9**9**9",
        "(" * 100_000 + "3+5" + ")" * 100_000,
        "3" * 10_000_000,
        "3+" * 5_000_000,
        "(" * 1_000,
        "9" * 400,
        "__import__('os').system('touch owned')",
        "().__class__.__bases__[0].__subclasses__()",
        "3+5" + "\n" * 900_000,
        "3+5 " * 200_000,
        "<answer>" * 100_000,
        "</answer>" * 100_000,
        "3" + "*3" * 200,
        "3" + "/3" * 200,
        "=" * 900_000,
    ],
)
def test_countdown_costs_nothing_whatever_is_written(completion, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    computed = []
    apply = arithmetic.apply
    monkeypatch.setattr(arithmetic, "apply", lambda *a: computed.append(a) or apply(*a))
    start = time.process_time()
    assert rewards.countdown(completion, [3, 5, 7], 56) == 0.0
    assert time.process_time() - start < 0.5
    assert len(computed) <= 2  # three numbers never need more than two operations
    assert not list(tmp_path.iterdir())


pieces = st.sampled_from(
    [*"0123456789+-*/()=. \n", "3", "5", "7", "56", "**", "<answer>", "</answer>", "</think>", "−", "×"]
)


@given(st.one_of(st.text(), st.lists(pieces, max_size=25).map("".join)), st.integers(-100, 100))
def test_countdown_never_raises_and_agrees_with_an_independent_evaluation(completion, target):
    score = rewards.countdown(completion, [3, 5, 7], target)
    assert score in (0.0, 1.0)
    if score:
        expression = answers.short_answer(completion).partition("=")[0].replace("−", "-").replace("×", "*").strip()
        expression = " ".join(expression.split())
        assert by_python(expression) == target and numbers(expression) == [3, 5, 7]


@pytest.mark.parametrize("completion", [None, 5, b"3+5", ["3+5"], float("nan")])
def test_countdown_needs_text(completion):
    with pytest.raises(UserError, match="must be a string"):
        rewards.countdown(completion, [3, 5], 8)


@pytest.mark.parametrize("nums, target", [([3, 5.0], 8), (["3"], 3), (None, 8), ([3, 5], "8"), ([3, True], 4), (3, 3)])
def test_countdown_needs_whole_numbers(nums, target):
    with pytest.raises(UserError, match="whole numbers"):
        rewards.countdown("3+5", nums, target)


def test_countdown_takes_the_numbers_of_numpy_and_torch():
    assert rewards.countdown("3+5", np.array([3, 5]), np.int64(8)) == 1.0
    assert rewards.countdown("3+5", torch.tensor([3, 5]), 8) == 1.0


# ---- Mathematics

MATHS = [
    # (gold, completion, reward)
    ("72", "The answer is 72 clips. Hope it helps!", 1),
    ("72", "72", 1),
    ("72", r"\boxed{72}", 1),
    ("72", r"\boxed{72 \text{ clips}}", 1),
    ("72", r"\boxed{72 clips}", 1),
    ("72", r"\boxed{\$72}", 1),
    ("72", r"It is \boxed{72} dollars. Bye 33.", 1),
    ("72", "#### 72", 1),
    ("72", "72 clips, 3 friends", 0),
    ("1,000", "The answer is $1,000.", 1),
    ("1000", "so she earns $1000 dollars per year", 1),
    ("1000", "#### 1,000", 1),
    ("70000", "$70{,}000$", 1),
    ("10080", r"\boxed{10,\!080}", 1),
    ("18", r"\boxed{18.00}", 1),
    ("18", "**Answer: $18**", 1),
    ("18", "**18**", 1),
    ("18", "The answer is:\n18", 1),
    ("18", r"The answer is $\boxed{18}$.", 1),
    ("18", r"Final answer: \( 18 \)", 1),
    ("18", "So 3*6 = 18 dollars.", 1),
    ("18", "The answer is $18 for the $2 bag", 1),
    ("12", "Total is $5 + $7 = $12", 1),
    ("-3", "#### -3", 1),
    ("3", "#### -3", 0),
    ("-5", "The answer is −5.", 1),
    ("0.333", "1/3", 0),
    ("3", "1/3", 0),
    ("5000000", "5 million", 0),
    ("5", r"\boxed{5 million}", 0),
    # the last of several answers wins
    ("72", r"\boxed{1} then \boxed{72}", 1),
    ("1", r"\boxed{1} then \boxed{72}", 0),
    ("7", "Answer: 5. Actually the answer is 7.", 1),
    ("5", "Answer: 5. Actually the answer is 7.", 0),
    ("7", "The answer is 7. I hope this answer is useful.", 1),
    ("7", "#### 5\n#### 7", 1),
    ("7", r"\boxed{5}" + "\n#### 7", 1),
    ("5", "#### 7\n" + r"\boxed{5}", 1),
    ("18", "<answer>17</answer> or <answer>$18$</answer>", 1),
    # a number that is only a part of the answer
    ("5", "The answer is 5 million dollars.", 0),
    ("5", r"\boxed{5\text{ million}}", 0),
    ("5", r"\boxed{5 millions}", 0),
    ("5", r"\boxed{5~\text{million}}", 0),
    (r"5 \text{ million}", r"\boxed{5}", 0),
    (r"5 \text{ million}", r"\boxed{5 million}", 1),
    ("5", "Total = 5 million dollars", 0),
    ("1", "The answer is 1e3 dollars", 0),
    ("10", "The answer is 10^6 dollars", 0),
    ("6", "It makes 10^6", 0),
    ("2", "The answer is 2^{10} in total", 0),
    ("1", "The answer is 1 1/2 cups", 0),
    ("1/2", "She used 1 1/2 cups", 0),
    ("5", "The answer is 5x+3 in all", 0),
    ("3", "There are 5x+3 in all", 0),
    ("2", "The answer is 2:30 pm", 0),
    ("7", "The answer is 7 or 8.", 0),
    ("10", "The answer is between 10 and 20.", 0),
    ("70000", "The answer is 70{,}000 dollars", 1),
    ("3", r"\boxed{1/٠}", 0),
    ("1", r"\boxed{١}", 0),
    # not several at once
    ("1", r"\boxed{1,2}", 0),
    ("12", r"\boxed{1,2}", 0),
    ("10", "10 or 12", 0),
    # thinking, with its tag in the completion or in the prompt
    ("18", "<think>it is 17</think>18", 1),
    ("18", "it is 17</think>The answer is 18", 1),
    ("17", "it is 17</think>The answer is 18", 0),
    ("18", "<think>it's 18", 0),
    ("18", r"<think>it's \boxed{18}</think>", 0),
    ("18", r"<answer>\boxed{18}</answer>", 1),
    ("18", "<answer>She earns $18 a day.</answer>", 1),
    # nothing there
    ("3", "", 0),
    ("3", "no idea", 0),
    ("18", r"\boxed{18", 0),
    ("18", r"1\boxed{}8", 0),
    # words
    (r"\text{Evelyn}", r"\boxed{Evelyn}", 1),
    (r"\text{Evelyn}", "The answer is Evelyn.", 1),
    ("Yes", r"\boxed{\text{yes}}", 1),
    ("east", r"\boxed{seat}", 0),  # the same letters, multiplied
]
BY_MATH_VERIFY = [
    ("18", r"\[ x = 18 \]", 1),
    (r"\frac{1}{2}", r"the answer is $\frac12$.", 1),
    (r"\frac{1}{2}", "0.5", 1),
    ("0.5", r"\boxed{\frac{1}{2}}", 1),
    (r"$\frac{1}{2}$", r"\boxed{\frac{2}{4}}", 1),
    (r"\boxed{\frac{3}{56}}", r"So the probability is $\dfrac{3}{56}$.", 1),
    (r"\frac{\pi}{2}", r"\boxed{\pi/2}", 1),
    (r"\frac{\pi}{2}", r"\boxed{\pi/3}", 0),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3,\pi/2)}", 1),
    ("p - q", r"\boxed{-q+p}", 1),
    ("x=5", r"\boxed{5}", 1),
    ("5", r"\boxed{x=5}", 1),
    ("2", r"\boxed{2x+3}", 0),
    ("2", r"\boxed{2\pi}", 0),
    (r"\sqrt{51}", r"$\sqrt{51}$", 1),
    (r"\sqrt{51}", r"$\sqrt{52}$", 0),
    ("6 - 5i", r"\boxed{-5i+6}", 1),
    ("0.72", "The answer is 72%", 1),
    ("1,-2", r"\boxed{-2, 1}", 1),
    (r"x^2", "The answer is $x^2$", 1),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}", r"\boxed{\begin{pmatrix} -\frac13 \\ \frac23 \end{pmatrix}}", 1),
]


@pytest.mark.parametrize("gold, completion, reward", MATHS)
def test_numbers_and_words_need_no_math_verify(gold, completion, reward, monkeypatch):
    monkeypatch.setattr(rewards, "_same_mathematics", lambda gold, answer: False)
    assert rewards.math_exact(completion, gold) == reward


@pytest.mark.parametrize("gold, completion, reward", [*MATHS, *BY_MATH_VERIFY])
def test_math_exact(gold, completion, reward):
    pytest.importorskip("math_verify")
    assert rewards.math_exact(completion, gold) == reward


@given(st.fractions(max_denominator=999), st.sampled_from(["{}", r"\boxed{{{}}}", "#### {}", "The answer is {}."]))
def test_a_number_equals_itself_and_not_its_neighbour(value, form):
    text = f"{value.numerator:,}" if value.denominator == 1 else str(value)
    assert rewards.math_exact(form.format(text), str(value)) == 1.0
    assert rewards.math_exact(form.format(text), str(value + 1)) == 0.0


@pytest.mark.parametrize("completion", [r"\boxed{9^{9^{9}}}", r"\boxed{99999999!}"])
def test_endless_mathematics_scores_zero_and_is_asked_once(completion, monkeypatch):
    pytest.importorskip("math_verify")
    asked = []
    monkeypatch.setattr(rewards, "ask", lambda *a: asked.append(a) or bounded_ask(*a, seconds=0.5))
    rewards._same_mathematics.cache_clear()
    assert [rewards.math_exact(completion, "72") for _ in range(8)] == [0.0] * 8
    assert len(asked) == 1
    rewards._same_mathematics.cache_clear()


@pytest.mark.parametrize("size", [10_000_000, 900_000])
def test_long_completions_cost_nothing(size):
    start = time.process_time()
    assert rewards.math_exact("7" * size, "7") == 0.0
    assert rewards.math_exact("7 " * (size // 2) + r"\boxed{" + "7" * 600 + "}", "7") == 0.0
    assert time.process_time() - start < 1.0


def test_a_missing_gold_answer_is_an_error():
    for gold in ("", " ", r"\boxed{}", "9" * 600):
        with pytest.raises(UserError, match="gold answer"):
            rewards.math_exact("7", gold)
    with pytest.raises(UserError, match="must be a string"):
        rewards.math_exact(None, "7")


def test_math_verify_missing_is_not_a_wrong_answer(monkeypatch):
    """A grader that cannot run must stop the run, not score 0."""

    def missing(*arguments, **options):
        raise bounded_error("ModuleNotFoundError: No module named 'math_verify'")

    monkeypatch.setattr(rewards, "ask", missing)
    rewards._same_mathematics.cache_clear()
    with pytest.raises(UserError, match="No module named 'math_verify'"):
        rewards.score_all(lambda c, row: rewards.math_exact(c, "x+1"), ["$x+2$", "$x$"], [{}, {}])


def test_gsm8k_gold():
    assert rewards.gsm8k_gold("48/2 = <<48/2=24>>24\n#### 1,072") == "1072"
    assert rewards.gsm8k_gold("#### 5\n#### -7 ") == "-7"
    for bad in ("no mark: 72", "72\n####", "72\n####  "):
        with pytest.raises(UserError, match="####"):
            rewards.gsm8k_gold(bad)


@pytest.mark.parametrize("file", ["gsm8k/train_1000.jsonl", "gsm8k/test.jsonl"])
def test_real_gsm8k_solutions_score_one_and_others_zero(repository, file):
    path = repository.parent / "shared" / "data" / file
    if not path.exists():
        pytest.skip("needs the real GSM8K rows")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    golds = [rewards.gsm8k_gold(row["answer"]) for row in rows]
    assert all(rewards.math_exact(row["answer"], gold) == 1.0 for row, gold in zip(rows, golds))
    for row, gold, other in zip(rows, golds, golds[1:]):
        assert rewards.math_exact(row["answer"], other) == float(gold == other)


@pytest.mark.parametrize("form", ["#### {}", "BOX", "The answer is {}.", "The answer is ${}.", "So it takes {} hours."])
@pytest.mark.parametrize("file", ["gsm8k/train_1000.jsonl", "gsm8k/test.jsonl"])
def test_real_gsm8k_answers_score_one_in_every_form(repository, file, form):
    path = repository.parent / "shared" / "data" / file
    if not path.exists():
        pytest.skip("needs the real GSM8K rows")
    for line in path.read_text(encoding="utf-8").splitlines():
        written = json.loads(line)["answer"].rpartition("####")[2].strip()
        completion = rf"\boxed{{{written}}}" if form == "BOX" else form.format(written)
        assert rewards.math_exact(completion, rewards.gsm8k_gold(f"#### {written}")) == 1.0, completion


def test_real_math500_solutions_score_one(repository):
    path = repository.parent / "shared" / "data" / "math500" / "test.jsonl"
    if not path.exists():
        pytest.skip("needs the real MATH-500 rows")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(rewards.math_exact(row["solution"], row["answer"]) == 1.0 for row in rows)


# ---- Similarity and format


def by_hand_f1(prediction: str, reference: str) -> float:
    """SQuAD's F1 as its paper defines it, from precision and recall."""
    ours, theirs = rewards.words(prediction), rewards.words(reference)
    common = sum(min(ours.count(word), theirs.count(word)) for word in set(ours))
    if not common:
        return 0.0
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


texts = st.lists(st.sampled_from("the a cat Cat sat, on mat. mat! dog 12 3".split()), max_size=30).map(" ".join)


@given(texts, texts)
def test_similarity_is_squad_f1_and_rouge_l(prediction, reference):
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")

    class Words:
        def tokenize(self, text):
            return rewards.words(text)

    score = rewards.similarity(prediction, reference)
    if rewards.words(prediction) and rewards.words(reference):
        rouge = rouge_scorer.RougeScorer(["rougeL"], tokenizer=Words()).score(reference, prediction)["rougeL"].fmeasure
        assert score == pytest.approx(0.6 * by_hand_f1(prediction, reference) + 0.4 * rouge)
    else:
        assert score == float(rewards.words(prediction) == rewards.words(reference))


def test_similarity_by_hand():
    # cat sat on mat / cat sat at mat: 3 words in common, in order: both F1 are 2·3/8.
    assert rewards.similarity("The cat sat on the mat.", "a cat sat at a mat") == pytest.approx(0.75)
    # The same words backwards: F1 1, longest common subsequence 1 of 3.
    assert rewards.similarity("one two three", "three two one") == pytest.approx(0.6 + 0.4 / 3)
    assert rewards.similarity("same words", "Same, words!") == 1.0
    assert rewards.similarity("one", "two") == rewards.similarity("", "two") == rewards.similarity("the", "two") == 0.0


def test_similarity_leaves_out_thinking_and_tags():
    assert rewards.similarity("<think>two three</think><answer>one</answer>", "one") == 1.0
    assert rewards.similarity("two three</think>one", "<think>four</think>one") == 1.0
    assert rewards.similarity("<think>one", "one") == 0.0
    with pytest.raises(UserError, match="must be a string"):
        rewards.similarity("one", None)


def test_similarity_of_long_texts_is_fast():
    rng = random.Random(0)
    ours, theirs = (" ".join(rng.choices("abcdefghij", k=5_000)) for _ in range(2))
    start = time.process_time()
    assert 0 < rewards.similarity(ours, theirs) < 1  # cell by cell, 25 million steps
    rewards.similarity("one " * 200_000, "one two " * 100_000)
    assert time.process_time() - start < 3.0


GOOD = "<think>first</think><answer>then</answer>"


@pytest.mark.parametrize("completion", [GOOD, f"\n{GOOD}\n", "<think>\na < b\n</think>\n\n<answer>\n3\n</answer>"])
def test_format_is_right(completion):
    assert rewards.format_reward(completion) == rewards.format_reward(completion, template_opened_think=True) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "then",
        "<answer>then</answer>",
        "<think>first</think>then",
        "<think>first<answer>then</answer>",
        "<think>first</think><answer>then",
        "<think>first</think>then</answer>",
        "<think></think><answer>then</answer>",
        "<think>first</think><answer> </answer>",
        f"so {GOOD}",
        f"{GOOD} bye",
        f"{GOOD}{GOOD}",
        "<think>first</think> and <answer>then</answer>",
        "<think><think>first</think><answer>then</answer>",
        "<think>first</think></think><answer>then</answer>",
        "<think><answer>1</answer></think><answer>then</answer>",
        "<answer>then</answer><think>first</think>",
        " " * 900_000,
        "<think>" * 100_000,
    ],
)
@pytest.mark.parametrize("opened", [False, True])
def test_format_is_wrong(completion, opened):
    start = time.process_time()
    assert rewards.format_reward(completion, template_opened_think=opened) == 0.0
    assert time.process_time() - start < 0.5


def test_a_template_that_opens_the_thought_is_allowed_for():
    """Otherwise the format reward is 0 for ever, whatever the model does."""
    completion = "first</think><answer>then</answer>"
    assert rewards.format_reward(completion) == 0.0
    assert rewards.format_reward(completion, template_opened_think=True) == 1.0


def test_format_and_similarity():
    assert rewards.format_and_similarity(GOOD, "then") == pytest.approx(1.0)
    assert rewards.format_and_similarity("then", "then") == pytest.approx(0.65)
    assert rewards.format_and_similarity("<think>first</think><answer>no</answer>", "then") == pytest.approx(0.35)
    opened = rewards.format_and_similarity("first</think><answer>then</answer>", "then", template_opened_think=True)
    assert opened == pytest.approx(1.0)


# ---- Many rollouts


def score(completion: str, row: dict) -> float | None:
    if completion == "raise":
        raise ZeroDivisionError("the grader fell over")
    return {"none": None, "nan": math.nan, "inf": math.inf}.get(completion, row["reward"])


def test_a_failed_grader_costs_its_rollout_only():
    rows = [{"reward": i / 4} for i in range(6)]
    scores, failed, first = rewards.score_all(score, ["a", "raise", "none", "nan", "inf", "b"], rows)
    assert scores == [0.0, None, None, None, None, 1.25] and failed == 4
    assert "ZeroDivisionError: the grader fell over" in first and "Traceback" in first


def test_nothing_failed():
    assert rewards.score_all(score, ["a", "b"], [{"reward": True}, {"reward": np.float32(0.5)}]) == (
        [1.0, 0.5],
        0,
        None,
    )
    assert rewards.score_all(score, [], []) == ([], 0, None)
    assert rewards.score_all(score, ["a"], [{"reward": torch.tensor(0.25)}]) == ([0.25], 0, None)


@pytest.mark.parametrize(
    "kind, message", [("raise", "ZeroDivisionError"), ("none", "returned None"), ("nan", "returned nan")]
)
def test_a_grader_that_fails_for_all_stops_with_the_first_traceback(kind, message):
    with pytest.raises(UserError, match=re.compile(f"all 3 rollouts.*Traceback.*{message}", re.DOTALL)):
        rewards.score_all(score, [kind] * 3, [{"reward": 1.0}] * 3)


def test_a_reward_that_is_no_number_is_a_failure():
    scores, failed, first = rewards.score_all(lambda c, row: row, ["a", "b"], [{"x": 1}, 0.5])
    assert scores == [None, 0.5] and failed == 1 and "TypeError" in first


def test_completions_and_rows_must_match():
    with pytest.raises(UserError, match="2 completions for 1 rows"):
        rewards.score_all(score, ["a", "b"], [{"reward": 1}])


def test_ctrl_c_is_not_a_failed_rollout():
    def interrupted(completion, row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewards.score_all(interrupted, ["a"], [{}])
