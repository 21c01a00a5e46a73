"""The process in which other people's graders run: math-verify and reasoning-gym. Started and spoken to by ``bounded``.

Reads one JSON list a line, ``[seconds, job, *arguments]``, and answers with ``{"value": …}`` or ``{"error": …}``,
until its input ends. It is run as a file and imports nothing of ``sage_lite``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import signal
import sys
from functools import lru_cache

MEMORY = 4 * 2**30  # bytes of address space, where the system can enforce it
EVALUATING = {"eval", "exec", "parse_expr", "sympify"}  # run their argument as Python; the last two are SymPy's


def math_equal(gold: str, answer: str) -> bool:
    """Whether two answers in LaTeX, without dollars, are the same mathematics to math-verify.

    Only its LaTeX parser is used, which builds its tree from a grammar: its parser for plain expressions goes through
    ``eval``.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    def read(latex: str) -> list:
        text = "$" + latex.replace("\n", " ").replace("$", "") + "$"
        return parse(text, [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)

    try:
        return bool(verify(read(gold), read(answer), timeout_seconds=None))
    except Exception:
        return False


def gym_names() -> list[str]:
    """All data sets of reasoning-gym."""
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def gym_evaluates(name: str) -> list[str]:
    """Which functions that run text as Python are called in the file that holds this data set's scorer."""
    import ast
    import inspect

    from reasoning_gym.factory import DATASETS

    with open(inspect.getsourcefile(DATASETS[name][0].score_answer), encoding="utf-8") as file:
        tree = ast.parse(file.read())
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = {func.id if isinstance(func, ast.Name) else getattr(func, "attr", "") for func in called}
    return sorted(names & EVALUATING - own)


@lru_cache(maxsize=16)
def _dataset(name: str, config: str):
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **json.loads(config))


@lru_cache(maxsize=100_000)
def _entry(name: str, config: str, index: int) -> dict:
    return _dataset(name, config)[index]


def gym_rows(name: str, config: str) -> list[dict]:
    """The entries of a data set: ``question``, ``answer`` (``None`` if it has none) and ``metadata``, in JSON.

    Its scorer is tried on its own answer first, so that a scorer that cannot work is found here and not in training.
    """
    dataset = _dataset(name, config)
    rows = [_entry(name, config, i) for i in range(len(dataset))]
    dataset.score_answer(rows[0]["answer"] or "", rows[0])
    return rows


def gym_score(name: str, config: str, index: int, answer: str) -> float | None:
    """The data set's own score of an answer to its entry ``index``; 0.0 if the scorer cannot read the answer."""
    try:
        score = _dataset(name, config).score_answer(answer, _entry(name, config, index))
    except Exception:
        return 0.0
    return None if score is None else float(score)


JOBS = {job.__name__: job for job in (math_equal, gym_names, gym_evaluates, gym_rows, gym_score)}


def run(seconds: float, job: str, *arguments: object) -> object:
    """A job's result. Beyond ``seconds`` of computing, preparations aside, the process ends, even inside a C call.

    Computing time, not time by the clock: on a busy machine the same answers get the same rewards.
    """
    importlib.import_module("math_verify" if job == "math_equal" else "reasoning_gym")
    if job == "gym_score":
        _entry(*arguments[:3])  # after a restart it is generated anew, which may take long
    if not hasattr(signal, "setitimer"):  # Windows: only the time by the clock that ``bounded`` allows
        return JOBS[job](*arguments)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return JOBS[job](*arguments)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _plain(value: object) -> object:
    return value.item() if hasattr(value, "item") else str(value)


def serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # Graders may print; the answers go to the original stream.
    out, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps({"value": "ready"}), file=out, flush=True)
    for line in sys.stdin:
        try:
            reply = json.dumps({"value": run(*json.loads(line))}, default=_plain)
        except Exception as error:
            reply = json.dumps({"error": f"{type(error).__name__}: {error}"})
        print(reply, file=out, flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules must not stand in for others of the same name
    serve()
