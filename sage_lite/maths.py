"""Data sets of mathematics questions: where they are, what their columns mean, and how a row becomes ours."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sage_lite.answers import without_thinking
from sage_lite.rewards import gsm8k_gold


@dataclass(frozen=True)
class MathsSource:
    """A data set of mathematics questions: its hub id and the columns of its known versions."""

    hub: str
    config: str | None
    columns: tuple[dict[str, str], ...]  # our field -> its column
    max_new_tokens: int  # the paper's
    split: str | None = None  # what all rows are, where no split is given


MATHS = {
    "gsm8k": MathsSource("openai/gsm8k", "main", ({"question": "question", "solution": "answer"},), 256),
    "deepmath": MathsSource(
        "zwhe99/DeepMath-103K",
        None,
        (
            {"question": "question", "answer": "final_answer", "solution": "r1_solution_1"},
            {"question": "prompt", "answer": "solution"},  # trl-lib/DeepMath-103K: no worked solutions
        ),
        1024,
    ),
    "math500": MathsSource(
        "HuggingFaceH4/MATH-500",
        None,
        ({"question": "problem", "answer": "answer", "solution": "solution"},),
        1024,
        split="test",
    ),
}


def maths_row(row: dict) -> dict:
    """One row: ``question``, ``answer`` (the final answer alone), ``solution`` (worked, without thinking) or ``None``.

    Raises ``ValueError`` for a question or answer that is no text or empty.
    """
    question, answer, solution = row["question"], row["answer"], row.get("solution")
    if isinstance(question, list) and question and isinstance(question[-1], dict):
        question = question[-1].get("content")  # a conversation of one message
    for column, value in (("question", question), ("answer", answer)):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"the {column} must be a text that is not empty, not {value!r:.80}")
    if solution is not None and not isinstance(solution, str):
        raise ValueError(f"the solution must be a text, not {solution!r:.80}")
    solution = without_thinking(solution or "").strip()
    return {"question": question.strip(), "answer": answer.strip(), "solution": solution or None}


def gsm8k_row(row: dict) -> dict:
    """A row of GSM8K: the solution ends in ``#### answer``; its calculator notes ``<<48/2=24>>`` are removed."""
    if not isinstance(row["solution"], str):
        raise ValueError(f"the answer must be a text, not {row['solution']!r:.80}")
    gold = gsm8k_gold(row["solution"])
    return maths_row({**row, "answer": gold, "solution": re.sub(r"<<[^<>]*>>", "", row["solution"])})


def standin_row(row: dict) -> dict:
    """A row of reasoning-gym's gsm_symbolic in the same form."""
    return {"question": row["question"], "answer": row["answer"], "solution": row["metadata"]["answer_cot"]}
