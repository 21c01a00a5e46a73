"""Ask a model by hand: sample a few completions of one problem, and see what the task's reward says about each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from sage_lite.errors import UserError
from sage_lite.policy import Policy
from sage_lite.rewards import score_all
from sage_lite.rollout import sample
from sage_lite.tasks import Task, load_task

HELP = """A number is a row of the task's test problems. Anything else is a problem of your own:
  countdown   3 5 7 = 22
  maths       What is 7 times 8? => 56      (without "=> answer" it is not graded)
  any task    {"nums": [3, 5, 7], "target": 22}      a row as in the task's data
An empty line ends."""


@dataclass
class Reply:
    """The prompt as the model got it, its completions, and their rewards; None where one could not be graded."""

    prompt: str
    texts: list[str]
    rewards: list[float | None]

    def __str__(self) -> str:
        lines = [f"prompt: {self.prompt}"]
        for text, reward in zip(self.texts, self.rewards):
            shown = "not graded" if reward is None else f"{reward:.3g}"
            lines.append(f"  reward {shown:<10} {text.strip()!r}")
        graded = [r for r in self.rewards if r is not None]
        if graded:
            lines.append(f"  mean reward {sum(graded) / len(graded):.3f} of {len(graded)}")
        return "\n".join(lines)


def problem(task: Task, text: str) -> dict | None:
    """The row that a line typed by hand stands for (see HELP); None for a message that cannot be graded.

    Raises UserError for a row number or a row that the task does not have.
    """
    text = text.strip()
    if text.isdecimal():  # "²" is a digit, too, and no number to int()
        if len(text) > 12 or int(text) >= len(task.test):
            raise UserError(f"task {task.name!r} has the test rows 0 to {len(task.test) - 1}, not {text:.80}")
        return task.test[int(text)]
    if text.startswith("{"):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # the first also for a number of thousands of digits
            raise UserError(f"this row is not JSON: {error}") from None
        return _row(task, row)
    numbers = re.fullmatch(r"(\d{1,100}(?:[ ,]+\d{1,100})*)\s*=\s*(\d{1,100})", text)
    if task.name == "countdown" and numbers:
        return _row(task, {"nums": [int(n) for n in re.split(r"[ ,]+", numbers[1])], "target": int(numbers[2])})
    question, arrow, answer = text.rpartition("=>")
    if arrow and task.name in _BY_HAND:
        return _row(task, _BY_HAND[task.name](question.strip(), answer.strip()))
    return None


_BY_HAND: dict[str, Callable[[str, str], dict]] = {  # rows in the form of each task's data
    "gsm8k": lambda question, answer: {"question": question, "answer": f"#### {answer}"},
    "deepmath": lambda question, answer: {"question": question, "final_answer": answer, "r1_solution_1": ""},
    "math500": lambda question, answer: {"problem": question, "answer": answer, "solution": ""},
}


def _row(task: Task, row: dict) -> dict:
    """A row of the task's data, converted and checked by the task's own loader."""
    return load_task(task.name, [row], split="test").test[0]


def ask(
    policy: Policy,
    task: Task,
    text: str,
    *,
    samples: int = 4,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Reply:
    """Sample completions of a problem typed by hand (see HELP) and grade them."""
    style = policy.prompt_style if policy.prompt_style in task.styles else task.styles[0]
    row = problem(task, text)
    message = text.strip() if row is None else task.prompt(row, style)
    out = sample(
        policy, policy.encode([message]), samples, temperature=temperature, top_p=top_p,
        max_new_tokens=max_new_tokens or task.default_max_new_tokens(style),
        generator=torch.Generator(policy.device).manual_seed(seed),
    )  # fmt: skip
    rewards: list[float | None] = [None] * samples
    if row is not None:
        rewards, _, _ = score_all(task.score, out.texts, [row] * samples)
    return Reply(message, out.texts, rewards)


def talk(
    policy: Policy, task: Task, lines: Iterable[str], say: Callable[[str], None] = print, seed: int = 0, **settings
) -> None:
    """Answer line after line until an empty one; a line that makes no sense is explained and costs nothing."""
    say(HELP)
    for number, line in enumerate(lines):
        if not line.strip():
            return
        try:
            say(str(ask(policy, task, line, seed=seed + number, **settings)))
        except UserError as error:
            say(str(error))
