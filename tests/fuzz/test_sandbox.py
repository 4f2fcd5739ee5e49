"""Crashes, hangs and wrong results end a case, not the tests."""

import ctypes
import os
import time

import fuzz.sandbox
import pytest

ACTIONS = {
    "the process died": lambda: ctypes.string_at(8),
    "no answer in 1 s": lambda: time.sleep(60),
    "the process died: exit code 3": lambda: os._exit(3),
    "division by zero": lambda: 1 // 0,
    "nothing": lambda: None,
}


@pytest.mark.parametrize("failure", list(ACTIONS)[:-1])
def test_a_failure_is_reported_and_the_next_case_runs(failure, sandbox, monkeypatch):
    box = sandbox(lambda item: ACTIONS[item]())
    box.run("nothing")
    if "1 s" in failure:
        monkeypatch.setattr(fuzz.sandbox, "SECONDS", 1)
    with pytest.raises(AssertionError, match=failure):
        box.run(failure)
    monkeypatch.undo()
    box.run("nothing")
