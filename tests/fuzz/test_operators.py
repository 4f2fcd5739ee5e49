"""Every operator under valid, broken and wild calls."""

import pytest
import torch
from fuzz.broken_calls import BROKEN
from fuzz.check_call import check_call
from fuzz.operator_calls import calls
from fuzz.valid_calls import VALID
from hypothesis import given


@pytest.mark.parametrize("name", VALID)
def test_operator(name, sandbox):
    box = sandbox(check_call)
    given(calls(name))(box.run)()


def test_every_operator_is_fuzzed():
    declared = {
        schema.name.removeprefix("h2o_prefill::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("h2o_prefill::")
        and any("Tensor" in str(a.type) for a in schema.arguments)
    }
    assert set(VALID) == set(BROKEN) == declared
