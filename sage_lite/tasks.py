"""Tasks: prompts, a reward and a train/test split behind one name (``load_task``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sage_lite import countdown as arithmetic
from sage_lite import reasoning, rewards
from sage_lite.errors import UserError
from sage_lite.maths import MATHS, gsm8k_row, maths_row, standin_row
from sage_lite.sources import digest, hold_out, read

Data = str | Path | Sequence[dict]
STYLES = ("instruct", "short")


@dataclass
class Task:
    """Problems with their reward.

    ``train``, ``test``: rows, plain dicts. ``source``: where they came from, in words.
    ``score(completion, row)``: the reward, ``None`` if there is none.
    ``reference(row)``: a worked solution, ``None`` where there is none.
    ``prompts``, ``max_new_tokens``: by style, "instruct" (a request in English, for chat models) or "short" (the bare
    problem).
    """

    name: str
    train: list[dict]
    test: list[dict]
    prompts: dict[str, Callable[[dict], str]]
    score: Callable[[str, dict], float | None]
    reference: Callable[[dict], str | None]
    max_new_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STYLES, 256))
    source: str = "given"

    @property
    def styles(self) -> tuple[str, ...]:
        return tuple(self.prompts)

    def prompt(self, row: dict, style: str = "instruct") -> str:
        """The user message for a row. Raises ``UserError`` for a style the task does not have."""
        return self.prompts[self._known(style)](row)

    def default_max_new_tokens(self, style: str = "instruct") -> int:
        """How many tokens a completion may have, if nobody says otherwise."""
        return self.max_new_tokens[self._known(style)]

    def _known(self, style: str) -> str:
        if style not in self.prompts:
            raise UserError(f"task {self.name!r} has no prompt style {style!r}; it has {', '.join(self.prompts)}")
        return style


COUNTDOWN_HUB = "Jiayi-Pan/Countdown-Tasks-3to4"
REWARDS = ("exact", "similarity", "format_similarity")


def task_names() -> list[str]:
    """The names ``load_task`` knows; besides them, ``reasoning_gym:NAME``."""
    return ["countdown", *MATHS]


def hub_of(name: str) -> str | None:
    """The hub id of a task's own data set, which ``data="hub"`` stands for; ``None`` for a task that has none."""
    return COUNTDOWN_HUB if name == "countdown" else MATHS[name].hub if name in MATHS else None


def load_task(
    name: str,
    data: Data | None = None,
    *,
    split: str | None = None,
    test_size: int | None = None,
    pool_size: int | None = None,
    seed: int = 0,
    reward: str = "exact",
    template_opened_think: bool = False,
    size: int = 2_000,
    **options: object,
) -> Task:
    """The task ``name``: "countdown", "gsm8k", "deepmath", "math500", or "reasoning_gym:NAME".

    - ``data``: a file (JSONL, JSON, Parquet) or a folder with ``train*`` and ``test*`` files, a hub id, "hub" for the
      task's own one, a list of dicts, or ``None``: generated here, without a network. For the maths tasks that is a
      stand-in, reasoning-gym's gsm_symbolic.
    - ``split``: a source with an official split keeps it. Otherwise "train" or "test" makes all rows that part, and
      ``None`` holds out ``test_size`` distinct problems (default: a fifth, at most 400). MATH-500 is all test.
    - ``pool_size`` keeps only so many training rows. ``seed``: of the split and of generated data, not of training.
    - ``reward``: "exact"; for maths also "similarity" (to the worked solution) and "format_similarity", with
      ``template_opened_think`` as in ``rewards.format_reward``.
    - ``size``: training rows that reasoning-gym generates; ``options`` go to its data set.

    Raises ``UserError`` for anything unknown, missing or malformed.
    """
    if split not in (None, "train", "test"):
        raise UserError(f"split must be 'train', 'test' or None, not {split!r}")
    if pool_size is not None and pool_size < 1:
        raise UserError(f"pool_size must be at least 1, not {pool_size}")
    if test_size is not None and test_size < 0:
        raise UserError(f"test_size must be at least 0, not {test_size}")
    if reward not in REWARDS:
        raise UserError(f"unknown reward {reward!r}; there are {', '.join(REWARDS)}")
    family, colon, gym_name = name.partition(":")
    if name not in task_names() and not (family == "reasoning_gym" and colon):
        raise UserError(f"unknown task {name!r}; there are {', '.join(task_names())} and reasoning_gym:NAME")
    if options and not colon:
        raise UserError(f"task {name!r} has no option {', '.join(options)}")
    if reward != "exact" and name not in MATHS:
        raise UserError(f"task {name!r} has no worked solutions to compare with: its only reward is 'exact'")
    division = {"split": split, "test_size": test_size, "seed": seed}
    if colon:
        if data is not None or split is not None:
            raise UserError(f"{name} is generated: it takes neither data nor split; set size and test_size")
        task = _gym(name, gym_name, size, test_size, seed, options)
    elif name == "countdown":
        task = _countdown(data, division)
    else:
        task = _maths(name, data, division, size, reward, template_opened_think)
    task.train = task.train[:pool_size]
    return task


def _divide(
    parts: dict[str, list[dict]], key: Callable[[dict], object], split: str | None, test_size: int | None, seed: int
) -> tuple[list[dict], list[dict]]:
    """Rows as ``sources.read`` gives them, as (train, test)."""
    if "all" in parts and split is None:
        return hold_out(parts["all"], key, test_size, seed)
    if "all" in parts:
        parts = {split: parts["all"]}
    elif split is not None:
        parts = {part: rows for part, rows in parts.items() if part == split}
    test = parts.get("test", [])
    if test_size is not None and test_size < len(test):
        test = sorted(test, key=lambda row: digest(seed, key(row)))[:test_size]
    train = parts.get("train", [])
    if not train and not test:
        raise UserError(f"no problems are left with split={split!r} and test_size={test_size}")
    return train, test


def _countdown(data: Data | None, division: dict) -> Task:
    if data is None:
        parts = {"all": _countdown_generated(division["seed"])}
        source = "generated: three numbers from 1 to 9"
    else:
        data = hub_of("countdown") if data == "hub" else data
        parts = read(data, None, [{"nums": "nums", "target": "target"}], _countdown_row)
        source = _named(data)
    train, test = _divide(parts, lambda row: (tuple(sorted(row["nums"])), row["target"]), **division)
    # An operator and a pair of brackets for each number are more than an expression needs; four to spare.
    longest = max(sum(len(str(n)) for n in row["nums"]) + 3 * len(row["nums"]) for row in train + test)
    return Task(
        "countdown",
        train,
        test,
        {"instruct": _countdown_request, "short": lambda row: f"{' '.join(map(str, row['nums']))} = {row['target']}"},
        lambda completion, row: rewards.countdown(completion, row["nums"], row["target"]),
        _countdown_solution,
        {"instruct": 256, "short": longest + 4},
        source,
    )


def _countdown_generated(seed: int) -> list[dict]:
    rows = []
    for nums, target in arithmetic.problems():
        order = sorted(range(len(nums)), key=lambda i: digest("order", seed, nums, target, i))
        rows.append({"nums": [nums[i] for i in order], "target": target})
    return rows


def _countdown_row(row: dict) -> dict:
    nums, target = row["nums"], row["target"]
    if type(target) is not int:
        raise ValueError(f"target must be a whole number, not {target!r:.80}")
    limit = 10**arithmetic.MAX_DIGITS
    if not isinstance(nums, list) or not nums or any(type(n) is not int or not 0 <= n < limit for n in nums):
        raise ValueError(
            f"nums must be a list of whole numbers >= 0, at most {arithmetic.MAX_DIGITS} digits: {nums!r:.80}"
        )
    return {"nums": nums, "target": target}


def _countdown_request(row: dict) -> str:
    numbers = ", ".join(map(str, row["nums"]))
    return (
        f"Write an arithmetic expression that equals {row['target']}. Use each of the numbers {numbers} exactly once, "
        "no other numbers, and only + - * / and parentheses. Think briefly, then put the final expression between "
        "<answer> and </answer>, as in <answer>(1+2)*3</answer>."
    )


def _countdown_solution(row: dict) -> str | None:
    if len(row["nums"]) > arithmetic.MAX_ENUMERATED:
        return None
    return next(iter(arithmetic.solutions(row["nums"], row["target"])), None)


def _maths(name: str, data: Data | None, division: dict, size: int, reward: str, template_opened_think: bool) -> Task:
    maths = MATHS[name]
    if data is None:
        source = f"offline stand-in for {name}: reasoning-gym's gsm_symbolic"
        rows, _ = reasoning.gym_rows("gsm_symbolic", size, 0, division["seed"])
        parts = {"all": [standin_row(row) for row in rows]}
    else:
        data = hub_of(name) if data == "hub" else data
        source = _named(data)
        config = maths.config if data == maths.hub else None
        parts = read(data, config, maths.columns, gsm8k_row if name == "gsm8k" else maths_row)
        division["split"] = division["split"] or maths.split
    train, test = _divide(parts, lambda row: row["question"], **division)
    if reward != "exact" and not all(row["solution"] for row in train + test):
        raise UserError(f"reward {reward!r} needs worked solutions, but rows of {source} have none: use reward='exact'")

    def score(completion: str, row: dict) -> float:
        if reward == "exact":
            return rewards.math_exact(completion, row["answer"])
        if reward == "similarity":
            return rewards.similarity(completion, row["solution"])
        return rewards.format_and_similarity(completion, row["solution"], template_opened_think)

    if reward == "format_similarity":
        request = "Think between <think> and </think>, then write your solution between <answer> and </answer>."
    else:
        request = r"Think step by step, then put the final answer in \boxed{}."
    return Task(
        name,
        train,
        test,
        {"instruct": lambda row: f"{row['question']}\n\n{request}", "short": lambda row: row["question"]},
        score,
        lambda row: row["solution"],
        dict.fromkeys(STYLES, maths.max_new_tokens),
        source,
    )


def _gym(name: str, gym_name: str, size: int, test_size: int | None, seed: int, options: dict) -> Task:
    test_size = min(400, max(1, size // 5)) if test_size is None else test_size
    train, test = reasoning.gym_rows(gym_name, size, test_size, seed, **options)
    request = "Think briefly, then put only the final answer between <answer> and </answer>."
    return Task(
        name,
        train,
        test,
        {"instruct": lambda row: f"{row['question']}\n\n{request}", "short": lambda row: row["question"]},
        partial(reasoning.gym_score, gym_name),
        lambda row: row["answer"] if gym_name != "gsm_symbolic" else row["metadata"]["answer_cot"],
        source=f"generated by reasoning-gym: {gym_name}",
    )


def _named(data: Data) -> str:
    return str(data) if isinstance(data, (str, Path)) else "a list of rows"
