"""Tasks: prompts, a reward and a train/test split behind one name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from sage_lite import countdown as arithmetic
from sage_lite import rewards
from sage_lite.errors import UserError

STYLES = ("instruct", "short")


@dataclass
class Task:
    """Prompts with their reward. Rows are plain dicts with the columns of the data set they came from.

    ``prompt(row, style)`` is the user message: ``"instruct"`` for chat models, ``"short"`` the bare problem.
    ``score(completion, row)`` is the reward, ``None`` if there is none. ``reference(row)`` is a worked solution, or ``None``.
    ``max_new_tokens[style]`` is how long a completion may sensibly get.
    """

    name: str
    train: list[dict]
    test: list[dict]
    prompts: dict[str, Callable[[dict], str]]
    score: Callable[[str, dict], float | None]
    reference: Callable[[dict], str | None]
    max_new_tokens: dict[str, int] = field(default_factory=lambda: {"instruct": 256, "short": 256})

    @property
    def styles(self) -> tuple[str, ...]:
        return tuple(self.prompts)

    def prompt(self, row: dict, style: str = "instruct") -> str:
        return self.prompts[self._known(style)](row)

    def default_max_new_tokens(self, style: str = "instruct") -> int:
        return self.max_new_tokens[self._known(style)]

    def _known(self, style: str) -> str:
        if style not in self.prompts:
            raise UserError(f"task {self.name!r} has no prompt style {style!r}; it has {', '.join(self.prompts)}")
        return style


def digest(*parts: object) -> str:
    """A fixed pseudo-random key of some values, the same in every process and Python version (unlike ``hash``)."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def hold_out(rows: list[dict], key: Callable[[dict], Hashable], test_size: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Shuffles rows by a digest of ``key(row)`` and holds out ``test_size`` distinct keys: (train, test).

    Rows with an equal key (the same problem twice) never stand on both sides; ``test`` holds one row a key.
    """
    groups: dict[Hashable, list[dict]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    order = sorted(groups, key=lambda problem: digest(seed, problem))
    train = [row for problem in order[test_size:] for row in groups[problem]]
    return train, [groups[problem][0] for problem in order[:test_size]]


def _problem(row: dict) -> tuple:
    return tuple(sorted(row["nums"])), row["target"]


def _generated(seed: int) -> list[dict]:
    rows = []
    for nums, target in arithmetic.problems():
        order = sorted(range(len(nums)), key=lambda i: digest("order", seed, nums, target, i))
        rows.append({"nums": [nums[i] for i in order], "target": target})
    return rows


def _countdown_instruct(row: dict) -> str:
    numbers = ", ".join(str(number) for number in row["nums"])
    return (
        f"Write an arithmetic expression that equals {row['target']}. Use each of the numbers {numbers} exactly once, "
        "the operations + - * / and parentheses, and no other numbers. Think briefly, then put the final expression between "
        "<answer> and </answer>, for example <answer>(1+2)*3</answer>."
    )


def _countdown_short(row: dict) -> str:
    return f"{' '.join(str(number) for number in row['nums'])} = {row['target']}"


def load_task(name: str, data: str | None = None, *, test_size: int = 400, pool_size: int | None = None, seed: int = 0) -> Task:
    if name != "countdown" or data is not None:
        raise UserError(f"unknown task {name!r}")
    train, test = hold_out(_generated(seed), _problem, test_size, seed)
    return Task(
        name,
        train[:pool_size],
        test,
        {"instruct": _countdown_instruct, "short": _countdown_short},
        lambda completion, row: rewards.countdown(completion, row["nums"], row["target"]),
        lambda row: (arithmetic.solutions(row["nums"], row["target"]) or [None])[0],
        {"instruct": 256, "short": 24},
    )
