"""The notebooks' exercises: a registry, and `check`, which says in one line whether an answer is right.

    check("02.1", my_sage)    # prints "right: …", "not yet: …" or, for the untouched stub, "not done yet: …"

Each notebook has a module here (`nb02` holds 02.1, 02.2, …), imported when one of its exercises is asked for. A module
registers an exercise by decorating its checker, a function that takes the answer and raises `NotYet` if it is wrong:

    @exercise("02.1", "Write SAGE", difficulty=1, minutes=5, solution=_sage, wrong=[(_no_minus_one, "sum to zero")])
    def _check_sage(answer): ...

`wrong` lists typical wrong answers, each with a fragment of the message it must get; tests/test_exercises.py runs
them, the solution and the stub through the same checker. In the notebook stand `Exercise.heading` (in a markdown cell),
a stub cell (a function that ends in `return ...`, or `name = ...`), a cell `check("02.1", name)`, and in a <details>
the comment `<!-- solution 02.1 -->`, then a ```python block that defines `name` and needs only the notebook's imports.
"""

from __future__ import annotations

import importlib
import numbers
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sage_lite.errors import UserError


class NotYet(AssertionError):
    """The answer is wrong; the message says what differs, for which input."""


class NotDone(NotYet):
    """The answer is the stub: None or `...`, or a function that returns one of them."""


@dataclass(frozen=True)
class Exercise:
    """One exercise: `difficulty` 1 to 3, `stub` the untouched answer, `wrong` pairs (answer, message fragment)."""

    id: str
    title: str
    difficulty: int
    minutes: int
    checker: Callable[[Any], None]
    solution: Any
    stub: Any = None
    wrong: Sequence[tuple[Any, str]] = ()

    @property
    def heading(self) -> str:
        """The exercise's line in its notebook, such as `### Exercise 02.1 · Write SAGE · ●○○ · 5 min`."""
        dots = "●" * self.difficulty + "○" * (3 - self.difficulty)
        return f"### Exercise {self.id} · {self.title} · {dots} · {self.minutes} min"


_REGISTRY: dict[str, Exercise] = {}


def exercise(id: str, title: str, *, difficulty: int, minutes: int, solution: Any, stub: Any = None,
             wrong: Sequence[tuple[Any, str]] = ()) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Decorator that registers a checker. `stub` defaults to `...`, in a function where a function is wanted."""
    if stub is None:
        stub = (lambda *_, **__: ...) if callable(solution) else ...

    def register(checker: Callable[[Any], None]) -> Callable[[Any], None]:
        _REGISTRY[id] = Exercise(id, title, difficulty, minutes, checker, solution, stub, tuple(wrong))
        return checker

    return register


def get(id: str) -> Exercise:
    """The exercise called `id`; UserError where there is none."""
    module = f"nb{str(id).partition('.')[0]}"
    if any(found.name == module for found in pkgutil.iter_modules(__path__)):
        importlib.import_module(f"{__name__}.{module}")
    if id not in _REGISTRY:
        raise UserError(f"there is no exercise {id!r}; give its number as in its heading, such as \"02.1\"")
    return _REGISTRY[id]


def all_exercises() -> list[Exercise]:
    """Every exercise of every notebook, in order."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return [_REGISTRY[id] for id in sorted(_REGISTRY)]


def verdict(id: str, answer: Any) -> tuple[bool, str]:
    """Whether `answer` solves the exercise, and what `check` prints. Only an unknown `id` raises (UserError)."""
    task = get(id)
    try:
        if answer is None or answer is ...:
            raise NotDone
        if callable(task.solution):
            if not callable(answer):
                raise NotYet(f"give the function itself, not a value of it; got {text(answer)}")
            answer = _guarded(answer)
        task.checker(answer)
    except NotDone as why:
        return False, f"not done yet: {task.id} {task.title} {why}".rstrip()
    except NotYet as difference:
        return False, f"not yet: {' '.join(str(difference).split())}"
    except Exception as error:  # an answer of a kind that no checker foresees must not stop the notebook
        return False, f"not yet: your answer cannot be checked ({type(error).__name__}: {' '.join(str(error).split())})"
    return True, f"right: {task.id} {task.title}"


def check(id: str, answer: Any) -> None:
    """Print one line about `answer`: right, not yet (what differs), or not done yet. A wrong answer raises nothing."""
    print(verdict(id, answer)[1])


def agree(answer: Callable[..., Any], reference: Callable[..., Any], cases: Iterable[tuple], *,
          mistakes: Mapping[str, Callable[..., Any]] | None = None, names: Sequence[str] = (),
          rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """NotYet unless `answer(*case)` is `reference(*case)` for every case; `names` are the arguments' names.

    mistakes: message -> a function that makes it. Where the answer makes one in all cases, the message is given first.
    """
    cases = list(cases)
    for case in cases:
        got, want = answer(*case), reference(*case)
        if (problem := difference(got, want, rtol, atol)) is None:
            continue
        for message, mistaken in (mistakes or {}).items():
            if all(difference(answer(*c), mistaken(*c), rtol, atol) is None for c in cases):
                problem = f"{message}; {problem}"
                break
        given = ", ".join(f"{name} = {text(value)}" for name, value in zip(names, case))
        raise NotYet(f"{problem}" + (f" for {given}" if given else ""))


def expect(got: Any, want: Any, where: str, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """NotYet unless `got` is `want`, numbers or arrays of numbers; `where` says for which input or which quantity."""
    if (problem := difference(got, want, rtol, atol)) is not None:
        raise NotYet(f"{where}: {problem}")


def difference(got: Any, want: Any, rtol: float = 1e-4, atol: float = 1e-5) -> str | None:
    """What differs between two numbers or arrays (torch, numpy, nested lists), in words; None where nothing does."""
    want = _array(want)
    try:
        value = _array(got)
    except (TypeError, ValueError, RuntimeError):
        return f"expected numbers, got {text(got)}"
    if value.shape != want.shape:
        return f"expected shape {want.shape}, got {value.shape}"
    if np.allclose(value, want, rtol=rtol, atol=atol, equal_nan=True):
        return None
    return f"expected {text(want)}, got {text(value)}"


def text(value: Any, digits: int = 4) -> str:
    """A value on one short line: numbers rounded to `digits` significant digits, long arrays cut."""
    try:
        values = _array(value)
    except (TypeError, ValueError, RuntimeError):
        line = " ".join(repr(value).split())
        return line if len(line) <= 100 else line[:97] + "…"
    if values.ndim == 0:
        if isinstance(value, (bool, np.bool_)) or str(getattr(value, "dtype", "")) == "torch.bool":
            return str(bool(values))
        number = float(values)
        return f"{number:.0f}" if number.is_integer() and abs(number) < 1e6 else f"{number:.{digits}g}"
    if len(values) > 12:
        return f"[{', '.join(text(v, digits) for v in values[:10])}, … {len(values)} in all]"
    return f"[{', '.join(text(v, digits) for v in values)}]"


def _array(value: Any) -> np.ndarray:
    """Numbers as float64; ValueError or TypeError for what holds none."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()
    elif isinstance(value, (list, tuple)) and any(hasattr(v, "detach") for v in value):
        value = [_array(v) for v in value]
    elif not isinstance(value, (numbers.Real, np.ndarray, np.generic, list, tuple)):
        raise TypeError(f"not a number: {value!r}")
    array = np.asarray(value)
    # numpy would read "1" as 1 and None as nan
    if array.dtype.kind in "US" or (array.dtype.kind == "O" and None in array.flat):
        raise TypeError(f"not numbers: {value!r}")
    return array.astype(np.float64) + 0.0  # no negative zeros in messages


def _copy(value: Any) -> Any:
    """A copy of a tensor (still part of the graph), of an array, or of a list of them."""
    if isinstance(value, list):
        return [_copy(entry) for entry in value]
    return value.clone() if hasattr(value, "clone") else value.copy() if isinstance(value, np.ndarray) else value


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The reader's function on copies of its tensors; its own error and a stub's answer become NotYet."""

    def call(*args: Any, **options: Any) -> Any:
        try:
            result = function(*map(_copy, args), **options)
        except Exception as error:
            given = ", ".join(text(a) for a in args)
            raise NotYet(f"your function raised {type(error).__name__}: {error} for ({given})") from error
        if result is None:
            raise NotDone("(your function returns None: is a `return` missing?)")
        if result is ...:
            raise NotDone
        return result

    return call
