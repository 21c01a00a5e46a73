"""Asks other people's graders (``graders``) in a process of their own: no answer can cost more than a fixed time.

Graders can be led into computing without end: ``9^{9^{9}}`` for SymPy, "(R U)99999999" for a Rubik's cube. Time
limits by signal work in the main thread only and cannot interrupt one long C call; a process can be killed from any
thread at any moment.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

START_SECONDS = 60.0

_lock = threading.Lock()
_process: _Process | None = None


class GraderError(RuntimeError):
    """The grader's process could not be started, or the job raised; the message says what it said."""


class GraderTimeout(GraderError):
    """The grader did not answer in time, or died (of too much memory, say)."""


class _Process:
    def __init__(self) -> None:
        self.owner = os.getpid()
        # A fixed hash seed: data sets whose generators iterate over sets come out the same in every process.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("graders.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
            encoding="utf-8",
        )
        self.replies: queue.Queue[dict | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.replies.put(json.loads(line))
        self.replies.put(None)

    def reply(self, seconds: float) -> dict | None:
        """The next reply; ``None`` if the process died or said nothing for so long."""
        try:
            return self.replies.get(timeout=seconds)
        except queue.Empty:
            return None

    def send(self, request: list) -> None:
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it died: reply() finds its output ended

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def ask(job: str, *arguments: object, seconds: float = 2.0) -> object:
    """The result of a job in ``graders``, from any thread. Arguments and result are what JSON can hold.

    Raises ``GraderTimeout`` when the job computes for more than ``seconds`` (``graders.run``), and ``GraderError``
    with the job's own error. The process is started at the first call, and again after a timeout.
    """
    global _process
    with _lock:
        # A forked child inherits the parent's pipes and would take its parent's replies.
        if _process is None or _process.owner != os.getpid():
            _process = _Process()
            if _process.reply(START_SECONDS) is None:
                _process.stop()
                _process = None
                raise GraderError(f"{sys.executable} could not be started to run graders in a process of their own")
        reply = None
        try:
            _process.send([seconds, job, *arguments])
            reply = _process.reply(START_SECONDS + seconds)  # by the clock: room for imports and a busy machine
        finally:
            # Also after Ctrl-C: a reply still on its way would be taken for the next one's.
            if reply is None:
                _process.stop()
                _process = None
    if reply is None:
        raise GraderTimeout(f"{job} gave no answer within {seconds:g} seconds of computing")
    if "error" in reply:
        raise GraderError(reply["error"])
    return reply["value"]


@atexit.register
def _stop() -> None:
    if _process is not None and _process.owner == os.getpid():
        _process.stop()
