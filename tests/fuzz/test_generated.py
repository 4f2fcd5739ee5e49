"""Every operator under valid, broken and wild calls, and every C++ class under programs."""

import pytest
import torch
from random_calls.calls import check_call, draw_call
from random_calls.operators import TENSORS
from random_calls.programs import METHODS, check_program, draw_context, draw_program


@pytest.mark.parametrize("name", TENSORS)
def test_operator(name, fuzz):
    fuzz(check_call, draw_call, name)


@pytest.mark.parametrize("name", METHODS)
def test_class(name, fuzz):
    fuzz(check_program, draw_program, name)


def test_prompts(fuzz):
    fuzz(check_program, draw_context)


def test_every_operator_is_fuzzed():
    declared = {
        schema.name.removeprefix("h2o_prefill::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("h2o_prefill::")
        and any("Tensor" in str(a.type) for a in schema.arguments)
    }
    assert set(TENSORS) == declared
