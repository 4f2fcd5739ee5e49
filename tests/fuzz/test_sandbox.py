"""Crashes, hangs and wrong results end a case, not the tests."""

import ctypes
import os
import time

import fuzz.sandbox
import pytest


def act(item):
    if item == "crash":
        ctypes.string_at(8)
    if item == "hang":
        time.sleep(60)
    if item == "exit":
        os._exit(3)
    assert item != "fail", "a wrong result"


@pytest.mark.parametrize(
    ("item", "failure"),
    [
        ("crash", "the process died"),
        ("hang", "no answer in 1 s"),
        ("exit", "the process died: exit code 3"),
        ("fail", "a wrong result"),
    ],
)
def test_a_failure_is_reported_and_the_next_case_runs(item, failure, sandbox, monkeypatch):
    box = sandbox(act)
    box.run("good")
    if item == "hang":
        monkeypatch.setattr(fuzz.sandbox, "SECONDS", 1)
    with pytest.raises(AssertionError, match=failure):
        box.run(item)
    monkeypatch.undo()
    box.run("good")
