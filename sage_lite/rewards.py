"""Rewards: a completion in, a number out.

Exact rewards are 0.0 or 1.0. All read only the answer part of a completion (``sage_lite.answers``), and all have a
bounded cost whatever a model writes.
"""

from __future__ import annotations

import math
import operator
import re
import string
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

from sage_lite import countdown as arithmetic
from sage_lite.answers import (
    MAX_ANSWER,
    MAX_COMPLETION,
    bare,
    compound,
    maths_answer,
    plain_number,
    plain_text,
    short_answer,
    without_thinking,
)
from sage_lite.bounded import GraderTimeout, ask
from sage_lite.errors import UserError


def countdown(completion: str, nums: Sequence[int], target: int) -> float:
    """1.0 if the answer is an expression that uses each of ``nums`` exactly once and equals ``target``, else 0.0.

    The answer (``answers.short_answer``) may hold plain integers, ``+ - * /`` (also ``× ÷ −``), parentheses and
    spaces, and may end in ``= target`` (an integer, which must be the target). Not accepted: a sign before a number
    or a parenthesis (``-3+5``: the number given is 3, not −3), points, leading zeros, ``**``, ``//``, implied
    products, words. Arithmetic is exact; a division by zero scores 0.

    Raises ``UserError`` if the completion is not a string, or ``nums`` and ``target`` are not whole numbers.
    """
    nums, target = _whole(nums), _whole([target])[0]
    expression, equals, tail = short_answer(completion).partition("=")
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


def _whole(values: Sequence[int]) -> list[int]:
    try:
        if any(isinstance(value, bool) for value in values):
            raise TypeError
        return [operator.index(value) for value in values]
    except TypeError:
        raise UserError(f"countdown needs whole numbers for nums and target, not {values!r:.80}") from None


def math_exact(completion: str, answer: str) -> float:
    """1.0 if the mathematical answer in a completion equals ``answer``, else 0.0.

    What counts as the answer: ``answers.maths_answer``. Plain numbers, units and thousands commas aside, are compared
    as exact fractions and words as text; everything else by math-verify, for at most 2 seconds of computing
    (``bounded``): what takes longer is not equal. ``answer`` is the gold answer alone: a number, or LaTeX with or
    without dollars or a box.

    Raises ``UserError`` if the completion is not a string or ``answer`` is empty.
    """
    gold = bare(str(answer))
    if not gold:
        raise UserError(f"the gold answer {answer!r:.80} is empty, or longer than {MAX_ANSWER} characters")
    found = maths_answer(completion)
    if not found:
        return 0.0
    gold_number, found_number = plain_number(gold), plain_number(found)
    if gold_number is not None and found_number is not None:
        return float(gold_number == found_number)
    if plain_text(gold) == plain_text(found):
        return 1.0
    # math-verify reads "5\\text{ million}" as 5, the words being units to it.
    if (gold_number is not None and compound(found)) or (found_number is not None and compound(gold)):
        return 0.0
    # math-verify would read "east" as a product of four letters, and accept "seat".
    if re.fullmatch(r"[a-z]{2,}", plain_text(gold)):
        return 0.0
    return float(_same_mathematics(gold, found))


@lru_cache(maxsize=4096)  # the rollouts of a group often end in the same answer
def _same_mathematics(gold: str, answer: str) -> bool:
    try:
        return ask("math_equal", gold, answer)
    except GraderTimeout:
        return False


def gsm8k_gold(answer: str) -> str:
    """The final answer of a GSM8K solution: what follows the last ``####``, no commas. ``UserError`` if nothing."""
    _, mark, gold = answer.rpartition("####")
    if not mark or not gold.strip():
        raise UserError(f"a GSM8K answer ends in '#### number'; this one does not: ...{answer[-80:]!r}")
    return gold.strip().replace(",", "")


MAX_WORDS = 10_000  # of a text compared by similarity; the rest is not read
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[str]:
    """The words of a text as SQuAD counts them: lower case, without punctuation and the articles a, an, the."""
    return [word for word in text.lower().translate(_PUNCTUATION).split() if word not in ("a", "an", "the")][:MAX_WORDS]


def similarity(completion: str, reference: str) -> float:
    """0.6 SQuAD-F1 + 0.4 ROUGE-L-F1 of a completion and a reference solution, between 0.0 and 1.0.

    Both on ``words``; thinking is removed on both sides, ``<answer>`` tags are not counted as words. If one side has
    no words, 1.0 if the other has none either, else 0.0. Raises ``UserError`` if either is not a string.
    """
    ours, theirs = (words(re.sub("</?answer>", " ", without_thinking(text))) for text in (completion, reference))
    if not ours or not theirs:
        return float(ours == theirs)
    common = (Counter(ours) & Counter(theirs)).total()
    # F1 of precision n/len(ours) and recall n/len(theirs) is 2n/(len(ours)+len(theirs)).
    return 2 * (0.6 * common + 0.4 * _common_subsequence(ours, theirs)) / (len(ours) + len(theirs))


def _common_subsequence(ours: list[str], theirs: list[str]) -> int:
    """The length of the longest common subsequence.

    A row of the usual table is one integer, a 0 bit marking a column at which the value rises (Hyyrö 2004). The same
    number as rouge-score's, which fills the table cell by cell (300 times as long for 1,000 words).
    """
    places: dict[str, int] = {}
    for i, word in enumerate(theirs):
        places[word] = places.get(word, 0) | 1 << i
    full = row = (1 << len(theirs)) - 1
    for word in ours:
        matches = row & places.get(word, 0)
        row = (row + matches | row - matches) & full
    return len(theirs) - row.bit_count()


def format_reward(completion: str, template_opened_think: bool = False) -> float:
    """1.0 if a completion is ``<think>…</think><answer>…</answer>``, each tag once and both parts not blank, else 0.0.

    White space may stand before, between and after the two parts, other text not. With ``template_opened_think`` the
    chat template has put ``<think>`` at the end of the prompt, so that the completion need not begin with it. Raises
    ``UserError`` if the completion is not a string.
    """
    if not isinstance(completion, str):
        raise UserError(f"a completion must be a string, not {type(completion).__name__}: {completion!r:.80}")
    if len(completion) > MAX_COMPLETION:
        return 0.0
    text = completion.strip()
    if not text.startswith("<think>") and not template_opened_think:
        return 0.0
    thought, _, rest = text.removeprefix("<think>").partition("</think>")
    rest = rest.strip()
    answer = rest.removeprefix("<answer>").removesuffix("</answer>")
    both_tags = len(rest) == len("<answer>") + len(answer) + len("</answer>")
    nested = any(tag in part for part in (thought, answer) for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    return float(both_tags and not nested and bool(thought.strip()) and bool(answer.strip()))


def format_and_similarity(completion: str, reference: str, template_opened_think: bool = False) -> float:
    """0.35 ``format_reward`` + 0.65 ``similarity``, between 0.0 and 1.0; errors as there."""
    return 0.35 * format_reward(completion, template_opened_think) + 0.65 * similarity(completion, reference)


def score_all(
    score_fn: Callable[[str, dict], float | None], completions: Sequence[str], rows: Sequence[dict]
) -> tuple[list[float | None], int, str | None]:
    """Scores rollouts one by one: ``(rewards, number failed, first failure's traceback or None)``.

    A rollout for which ``score_fn(completion, row)`` raises, or returns ``None`` or a number that is not finite, gets
    the reward ``None`` and is counted: it costs itself, not the run. Raises ``UserError`` with the first traceback if
    all fail, or if ``completions`` and ``rows`` differ in length.
    """
    if len(completions) != len(rows):
        raise UserError(f"{len(completions)} completions for {len(rows)} rows; give one row a completion")
    scores: list[float | None] = []
    first = None
    for completion, row in zip(completions, rows):
        try:
            value = score_fn(completion, row)
            score = None if value is None else float(value)
            if score is None or not math.isfinite(score):
                raise ValueError(f"the reward function returned {value!r} for the completion {completion!r:.200}")
        except Exception:
            score, first = None, first or traceback.format_exc()
        scores.append(score)
    failed = scores.count(None)
    if scores and failed == len(scores):
        raise UserError(f"the reward function failed for all {failed} rollouts; the first failure was:\n{first}")
    return scores, failed, first
