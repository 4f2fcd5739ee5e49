"""Every C++ class under programs of its methods, and prompts in a context."""

import pytest
from random_calls.check_program import check_program
from random_calls.programs import METHODS, draw_context, draw_program


@pytest.mark.parametrize("name", METHODS)
def test_class(name, fuzz):
    fuzz(check_program, draw_program, name)


def test_prompts(fuzz):
    fuzz(check_program, draw_context)
