from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from sage_lite import bounded
from sage_lite.bounded import GraderError, GraderTimeout, ask

pytest.importorskip("math_verify")


def test_jobs_answer_from_any_thread():
    results = []
    threads = [threading.Thread(target=lambda: results.append(ask("math_equal", "1/2", "0.5"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4 and ask("math_equal", "1/2", "0.6") is False


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="computing time is limited by the clock only here")
def test_endless_computing_is_ended_and_the_next_question_answered():
    """9^(9^9) is one C call of Python's: no signal handler would get its turn. Also off the main thread."""
    errors = []

    def endless():
        try:
            ask("math_equal", "72", "9^{9^{9}}", seconds=0.5)
        except GraderTimeout as error:
            errors.append(error)

    before = os.times()
    endless()
    thread = threading.Thread(target=endless)
    thread.start()
    thread.join()
    after = os.times()
    assert len(errors) == 2
    # Computing time of the ended processes: twice half a second and the imports, not minutes.
    assert after.children_user - before.children_user < 30
    assert ask("math_equal", "72", "72.0") is True


def test_a_process_that_was_killed_is_replaced():
    assert ask("math_equal", "1", "1")
    bounded._process.process.kill()
    with pytest.raises(GraderTimeout):
        ask("math_equal", "1", "1")
    assert ask("math_equal", "1", "1")


def test_an_interrupted_question_does_not_answer_the_next(monkeypatch):
    """Ctrl-C while waiting: the reply on its way must not be taken for the next one's."""
    assert ask("math_equal", "1", "1") is True

    def interrupted(self, seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bounded._Process, "reply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ask("math_equal", "1", "1")
    assert ask("math_equal", "1", "2") is False


def test_the_process_ignores_ctrl_c():
    assert ask("math_equal", "1", "1")
    process = bounded._process.process
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert ask("math_equal", "2", "2") and bounded._process.process is process


def test_errors_of_a_job_are_told():
    with pytest.raises(GraderError, match="KeyError: 'no_such_job'"):
        ask("no_such_job")
