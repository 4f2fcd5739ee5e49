"""Every operator against its oracle, in calls of any sizes, dtypes, layouts and settings.

`make test-fuzz` makes many more, under sanitizers, and programs of the classes.
"""

import random

import pytest
from random_calls.calls import check_call, draw_call
from random_calls.draw import Draw
from random_calls.operators import TENSORS

CALLS = 60


@pytest.mark.filterwarnings("ignore:the memory set")
@pytest.mark.parametrize("name", TENSORS)
def test_random_calls_agree_with_the_oracle(name):
    """A call with one wrong argument gives a ValueError and changes nothing."""
    for seed in range(CALLS):
        call = draw_call(Draw(random.Random(f"{name} {seed}")), name, ("valid", "valid", "broken"))
        try:
            check_call(call)
        except AssertionError as error:
            raise AssertionError(repr(call)) from error
