"""Every C++ class under programs of its methods."""

import pytest
import torch
from fuzz.check_program import check_program
from fuzz.object_programs import PROGRAMS
from hypothesis import given


@pytest.mark.parametrize("name", PROGRAMS)
def test_class(name, sandbox):
    box = sandbox(check_program)
    given(PROGRAMS[name])(box.run)()


def test_every_class_is_fuzzed():
    methods = torch._C._jit_get_custom_class_schemas()
    owners = [str(method.arguments[0].type) for method in methods if method.arguments]
    registered = {name.split(".")[-1] for name in owners if ".h2o_prefill." in name}
    assert set(PROGRAMS) == registered
