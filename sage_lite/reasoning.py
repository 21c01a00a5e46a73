"""Any reasoning-gym data set by name, scored by its own scorer, which runs in a process of its own (``bounded``)."""

from __future__ import annotations

import difflib
import json

from sage_lite import rewards
from sage_lite.answers import last_line, tagged, without_thinking
from sage_lite.bounded import GraderError, GraderTimeout, ask
from sage_lite.errors import UserError

MAX_ANSWER = 4_000  # characters given to a scorer; longer answers score 0
GENERATE_SECONDS = 240.0
_TEST_SEED = 1_000_000  # data sets draw entry i from seed + i: closer seeds would give the same entries


def gym_rows(name: str, size: int, test_size: int, seed: int, **config: object) -> tuple[list[dict], list[dict]]:
    """``(train, test)`` of a reasoning-gym data set; test is generated with another seed, without the prompts of train.

    A row: ``question``, ``answer`` (``None`` if it has none), ``metadata`` as reasoning-gym gives them, and
    ``origin``, from which its scorer finds the entry again. ``config``: the data set's own options.

    Raises ``UserError`` for an unknown name or option, for too few different prompts, and for data sets whose scorer
    might run a model's answer as Python.
    """
    names = _ask("gym_names")
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names)}"
        raise UserError(f"reasoning-gym has no data set {name!r}; {hint}")
    if name == "composite":
        raise UserError("reasoning_gym:composite mixes other data sets; name one of those")
    if name != "countdown":  # its scorer evaluates too; ours is used instead
        evaluates = _ask("gym_evaluates", name)
        if evaluates:
            raise UserError(
                f"reasoning_gym:{name} is refused: the file of its scorer calls {', '.join(evaluates)}, which can run "
                "a model's answer as Python"
            )
    if not 1 <= size <= _TEST_SEED or not 0 <= test_size <= _TEST_SEED:
        raise UserError(f"size must be 1 to {_TEST_SEED}, and test_size 0 to {_TEST_SEED}, not {size} and {test_size}")
    train = _distinct(_generate(name, size, seed, config), set())
    test = _distinct(_generate(name, test_size, seed + _TEST_SEED, config), {row["question"] for row in train})
    if test_size and not test:
        raise UserError(
            f"reasoning_gym:{name}: all {test_size} test prompts stand among the {size} to train on; lower size"
        )
    return train, test


def gym_score(name: str, completion: str, row: dict) -> float | None:
    """The data set's own score of a completion, between 0.0 and 1.0; Countdown by ``rewards.countdown``.

    The answer is what stands in ``<answer>…</answer>``, else the last line, or all of the text where the data set's
    own answer is not one line. An answer that the scorer cannot read, that takes it more than 2 seconds of computing
    or that has over ``MAX_ANSWER`` characters scores 0.
    """
    if name == "countdown":
        return rewards.countdown(completion, row["metadata"]["numbers"], row["metadata"]["target"])
    text = without_thinking(completion)
    answer = tagged(text)
    if answer is None:
        one_line = row["answer"] is not None and "\n" not in row["answer"].strip()
        answer = last_line(text) if one_line else text.strip()
    if len(answer) > MAX_ANSWER:
        return 0.0
    try:
        return ask("gym_score", name, *row["origin"], answer)
    except GraderTimeout:
        return 0.0


def _generate(name: str, size: int, seed: int, config: dict) -> list[dict]:
    if size == 0:
        return []
    text = json.dumps({**config, "size": size, "seed": seed})
    rows = _ask("gym_rows", name, text)
    return [{**row, "origin": [text, i]} for i, row in enumerate(rows)]


def _distinct(rows: list[dict], seen: set[str]) -> list[dict]:
    kept = []
    for row in rows:
        if row["question"] not in seen:
            seen.add(row["question"])
            kept.append(row)
    return kept


def _ask(job: str, *arguments: object):
    try:
        return ask(job, *arguments, seconds=GENERATE_SECONDS)
    except GraderError as error:
        raise UserError(f"reasoning-gym: {error}") from error
