"""The embedded model is what the demo and the notebooks count on: weak, but right now and then, and format-sure."""

from __future__ import annotations

import pytest

from sage_lite.evaluation import evaluate
from sage_lite.policy import load_policy
from sage_lite.tasks import load_task


@pytest.fixture(scope="module")
def start():
    task = load_task("countdown")
    return task, evaluate(load_policy(device="cpu"), task, samples=16, seed=0)


def test_it_starts_weak_and_can_be_improved(start):
    task, found = start
    assert len(task.test) == 400
    assert 0.10 < found.pass_at(1).value < 0.25
    assert found.pass_at(16).value > 0.70


def test_nearly_all_it_writes_is_an_expression_of_the_given_numbers(start):
    task, found = start
    rows = [row for row, texts in zip(task.test, found.texts) for _ in texts]
    digits = ["".join(sorted(c for c in text if c.isdigit())) for texts in found.texts for text in texts]
    good = [d == "".join(sorted(map(str, row["nums"]))) for d, row in zip(digits, rows)]
    assert sum(good) / len(good) > 0.9


def test_problems_differ_in_difficulty(start):
    rate = start[1].pass_rate
    assert (rate < 0.1).mean() > 0.1 and (rate > 0.3).mean() > 0.1
