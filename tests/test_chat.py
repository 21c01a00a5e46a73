from __future__ import annotations

import pytest
from small_models import small_policy

from sage_lite import chat
from sage_lite.errors import UserError
from sage_lite.tasks import load_task


@pytest.fixture(scope="module")
def policy():
    return small_policy()


@pytest.fixture
def countdown():
    rows = [{"nums": [3, 5, 7], "target": 22}, {"nums": [1, 2, 3], "target": 6}]
    return load_task("countdown", rows, split="test")


def test_a_line_is_a_row_number_a_problem_or_a_message(countdown):
    assert chat.problem(countdown, " 1 ") == countdown.test[1]
    wanted = {"nums": [3, 5, 7], "target": 22}
    for text in ("3 5 7 = 22", "3, 5, 7 = 22", '{"nums": [3, 5, 7], "target": 22}'):
        assert chat.problem(countdown, text) == wanted
    assert chat.problem(countdown, "Hello there") is None
    assert chat.problem(countdown, "²") is None  # a digit that int() does not take
    huge = "9" * 5000  # nor a number of so many digits
    assert chat.problem(countdown, f"3 5 {huge} = 22") is None
    for text, message in [("2", "rows 0 to 1, not 2"), ("{nums", "not JSON"), ('{"nums": [1]}', "target"),
                          (huge, "rows 0 to 1"), (f'{{"nums": [{huge}], "target": 1}}', "not JSON")]:  # fmt: skip
        with pytest.raises(UserError, match=message):
            chat.problem(countdown, text)


@pytest.mark.parametrize("name", ["gsm8k", "deepmath", "math500"])
def test_a_question_with_its_answer_is_graded_by_the_task(name):
    rows = [{"question": "1+1?", "answer": "#### 2", "final_answer": "2", "r1_solution_1": "", "problem": "1+1?",
             "solution": ""}]  # fmt: skip
    task = load_task(name, rows, split="test")
    row = chat.problem(task, "What is 7 times 8? => 56")
    assert row["question"] == "What is 7 times 8?" and task.score(r"So it is \boxed{56}", row) == 1.0
    assert task.score(r"\boxed{57}", row) == 0.0
    assert chat.problem(task, "What is 7 times 8?") is None


def test_completions_are_sampled_and_graded(policy, countdown, monkeypatch):
    monkeypatch.setattr(countdown, "score", lambda text, row: float(row["target"] == 22))
    reply = chat.ask(policy, countdown, "0", samples=3, max_new_tokens=4)
    assert reply.prompt == "3 5 7 = 22" and len(reply.texts) == 3 and reply.rewards == [1.0] * 3
    assert "mean reward 1.000 of 3" in str(reply)
    again = chat.ask(policy, countdown, "0", samples=3, max_new_tokens=4)
    assert again.texts == reply.texts
    free = chat.ask(policy, countdown, "Hello", samples=2, max_new_tokens=4)
    assert free.rewards == [None, None] and free.prompt == "Hello" and "not graded" in str(free)


def test_a_conversation_survives_a_line_that_makes_no_sense_and_ends_at_an_empty_one(policy, countdown):
    said = []
    lines = iter(["0", "77", "", "0"])
    chat.talk(policy, countdown, lines, said.append, samples=1, max_new_tokens=2)
    assert len(said) == 3 and said[0] == chat.HELP and "prompt: 3 5 7 = 22" in said[1] and "not 77" in said[2]
    assert next(lines) == "0"
