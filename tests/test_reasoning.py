from __future__ import annotations

import time

import pytest

from sage_lite import bounded, reasoning
from sage_lite.errors import UserError
from sage_lite.rewards import score_all
from sage_lite.tasks import load_task

pytest.importorskip("reasoning_gym")


def test_any_data_set_by_name_with_its_own_scorer():
    task = load_task("reasoning_gym:lcm", size=20, test_size=5, seed=3)
    assert len(task.train) == 20 and 1 <= len(task.test) <= 5
    for row in task.train:
        assert task.score(row["answer"], row) == 1.0
        assert task.score(f"<think>hm</think>It is\n<answer>{row['answer']}</answer>", row) == 1.0
        assert task.score(str(int(row["answer"]) + 1), row) < 1.0
        assert task.score("", row) == 0.0
    assert task.prompt(task.train[0], "short") == task.train[0]["question"]
    assert "<answer>" in task.prompt(task.train[0])


def test_rows_depend_on_the_seed_only_and_test_prompts_are_new():
    first = reasoning.gym_rows("gsm_symbolic", 40, 20, 0)
    bounded._process.stop()  # a new process, as in another run
    bounded._process = None
    again = reasoning.gym_rows("gsm_symbolic", 40, 20, 0)
    assert again == first
    assert reasoning.gym_rows("gsm_symbolic", 40, 20, 1) != first
    train, test = ({row["question"] for row in rows} for rows in first)
    assert len(train) == len(first[0]) and not train & test


def test_options_go_to_the_data_set():
    task = load_task("reasoning_gym:chain_sum", size=5, test_size=1, min_terms=6, max_terms=6)
    assert all(row["question"].count("+") + row["question"].count(" - ") == 5 for row in task.train)
    with pytest.raises(UserError, match="unexpected keyword argument 'terms'"):
        load_task("reasoning_gym:chain_sum", size=5, terms=6)
    with pytest.raises(UserError, match="reasoning-gym: AssertionError"):
        load_task("reasoning_gym:chain_sum", size=5, min_terms=0)


def test_answers_of_several_lines():
    task = load_task("reasoning_gym:mini_sudoku", size=2, test_size=0)
    row = task.train[0]
    assert "\n" in row["answer"]
    assert task.score(row["answer"], row) == 1.0
    assert task.score(f"So:\n<answer>\n{row['answer']}\n</answer>", row) == 1.0


def test_countdown_is_scored_by_our_verifier():
    """reasoning-gym's own evaluates the answer with SymPy."""
    task = load_task("reasoning_gym:countdown", size=5, test_size=0)
    for row in task.train:
        assert task.score(row["answer"], row) == 1.0
        assert task.score(row["answer"] + "+1", row) == 0.0
        assert task.score(f"__import__('time').sleep(60) or {row['answer']}", row) == 0.0


@pytest.mark.parametrize(
    "name", ["simple_integration", "polynomial_multiplication", "puzzle24", "n_queens", "binary_matrix"]
)
def test_scorers_that_evaluate_answers_are_refused(name):
    with pytest.raises(UserError, match=f"reasoning_gym:{name} is refused: .* (eval|parse_expr), which can run"):
        load_task(f"reasoning_gym:{name}")


def test_names():
    with pytest.raises(UserError, match="no data set 'gsm_symbolc'; did you mean gsm_symbolic"):
        load_task("reasoning_gym:gsm_symbolc")
    with pytest.raises(UserError, match="no data set 'zzzzzzzz'; there are .*chain_sum"):
        load_task("reasoning_gym:zzzzzzzz")
    with pytest.raises(UserError, match="name one of those"):
        load_task("reasoning_gym:composite")


def test_too_few_prompts_for_a_test_part():
    with pytest.raises(UserError, match="all 5 test prompts stand among the 40 to train on"):
        load_task("reasoning_gym:coin_flip", size=40, test_size=5, min_trials=3, max_trials=3)


@pytest.mark.parametrize("sizes", [{"size": 0}, {"size": 10**7}, {"size": 5, "test_size": 10**7}])
def test_sizes(sizes):
    with pytest.raises(UserError, match="size must be 1 to 1000000"):
        load_task("reasoning_gym:lcm", **sizes)


def test_an_answer_the_scorer_cannot_read_scores_zero():
    """Its scorer raises for words: malformed answers are wrong, they do not stop a run in which all are malformed."""
    task = load_task("reasoning_gym:prime_factorization", size=3, test_size=0)
    scores, failed, _ = score_all(task.score, ["no idea"] * 3, task.train)
    assert scores == [0.0] * 3 and failed == 0


def test_endless_scoring_is_ended():
    """A move repeated a hundred million times: minutes and gigabytes in the scorer itself."""
    task = load_task("reasoning_gym:rubiks_cube", size=1, test_size=0)
    row = task.train[0]
    start = time.process_time()
    assert task.score("(R U)99999999", row) == 0.0
    assert time.process_time() - start < 1.0
    assert task.score("R U", row) > 0.0  # the next one is scored: the process was started again


def test_long_answers_do_not_reach_the_scorer(monkeypatch):
    task = load_task("reasoning_gym:lcm", size=1, test_size=0)
    monkeypatch.setattr(reasoning, "ask", lambda *a, **k: pytest.fail("asked the scorer"))
    assert task.score("7" * (reasoning.MAX_ANSWER + 1), task.train[0]) == 0.0
