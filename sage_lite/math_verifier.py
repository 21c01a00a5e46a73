"""Are two mathematical answers equal? Asked of math-verify, in a process of its own.

math-verify works with SymPy, which can be led into computing without end (``9^{9^{9}}``). Its own time limits rely on signals:
they work in the main thread only and cannot interrupt one long C call. A process can be killed from any thread at any moment,
so the time is bounded for certain. Only its LaTeX parser is used, which builds its tree from a grammar; its parser for plain
expressions goes through Python's ``eval``.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
from functools import lru_cache

TIMEOUT = 5.0  # seconds for one comparison; a usual one takes milliseconds
START_TIMEOUT = 120.0  # seconds until SymPy is imported
MEMORY = 4 * 2**30  # bytes of address space, where the system can enforce it

_lock = threading.Lock()
_worker: _Worker | None = None


class _Worker:
    """The process, and a thread that reads its answers, one JSON line each; ``None`` marks the end of its output."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        ready = self.receive(START_TIMEOUT)
        if ready != "ready":
            self.stop()
            raise RuntimeError(f"math-verify could not be started in its own process: {ready or 'it ended without a word'}")

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(json.loads(line))
        self.lines.put(None)

    def receive(self, timeout: float) -> object:
        try:
            return self.lines.get(timeout=timeout)
        except queue.Empty:
            return None

    def ask(self, gold: str, answer: str) -> bool | None:
        """Whether the two are equal; ``None`` if the process died or took longer than ``TIMEOUT``."""
        try:
            self.process.stdin.write(json.dumps([gold, answer]) + "\n")
            self.process.stdin.flush()
        except OSError:
            return None
        return self.receive(TIMEOUT)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@lru_cache(maxsize=4096)  # the rollouts of a group often end in the same answer
def equal(gold: str, answer: str) -> bool:
    """Whether two answers in LaTeX (without dollars) are the same mathematics, by math-verify; from any thread.

    An answer that takes longer than ``TIMEOUT`` seconds to compare, or too much memory, counts as different. Raises
    ``ModuleNotFoundError`` if math-verify is not installed.
    """
    global _worker
    with _lock:
        # A forked child inherits the parent's pipes and would read its parent's answers.
        if _worker is None or _worker.owner != os.getpid():
            if importlib.util.find_spec("math_verify") is None:
                raise ModuleNotFoundError("math-verify is needed to compare mathematical answers: pip install math-verify")
            _worker = _Worker()
        result = None
        try:
            result = _worker.ask(gold, answer)
        finally:
            # Also after Ctrl-C: an answer still on its way would be taken for the next one's.
            if result is None:
                _worker.stop()
                _worker = None
        return bool(result)


@atexit.register
def _stop() -> None:
    if _worker is not None and _worker.owner == os.getpid():
        _worker.stop()


def _compare(gold: str, answer: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    def read(latex: str) -> list:
        text = "$" + latex.replace("\n", " ").replace("$", "") + "$"
        return parse(text, [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)

    return verify(read(gold), read(answer), timeout_seconds=None)


def _serve() -> None:
    """The process: reads ``[gold, answer]`` a line, writes true or false a line, until its input ends."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # Third-party code may print; the answers go to the original stream.
    answers, sys.stdout = sys.stdout, sys.stderr
    try:
        _compare("1", "1")
        ready = "ready"
    except Exception as error:
        ready = f"{type(error).__name__}: {error}"
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        try:
            result = bool(_compare(*json.loads(line)))
        except Exception:
            result = False
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules must not stand in for others of the same name
    _serve()
