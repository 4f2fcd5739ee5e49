"""Every operator under valid, broken and wild calls."""

import pytest
import torch
from random_calls.calls import check_call, draw_call
from random_calls.operators import TENSORS


@pytest.mark.parametrize("name", TENSORS)
def test_operator(name, fuzz):
    fuzz(check_call, draw_call, name)


def test_every_operator_is_fuzzed():
    declared = {
        schema.name.removeprefix("h2o_prefill::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("h2o_prefill::")
        and any("Tensor" in str(a.type) for a in schema.arguments)
    }
    assert set(TENSORS) == declared
