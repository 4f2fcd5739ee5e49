"""Cases that were found by fuzzing, as it printed them."""

import pytest
from fuzz.arguments import Filled, Floats, Ints, Scores, SparseMatrix
from fuzz.check_call import check_call
from fuzz.check_program import check_program
from fuzz.object_programs import Program, Step
from fuzz.operator_calls import Call

ROWS = Floats((1, 2, 8, 1))
KEYS = Floats((1, 1, 8, 1), seed=100)
VALUES = Floats((1, 1, 8, 1), seed=200)
NO_QUERIES = Floats((1, 1, 0, 1))
ONE_KEY = Floats((1, 1, 1, 1))

CALLS = {
    "a position beyond every prompt": Call(
        "advance_position_",
        (Ints((0, 0), (2,), "int64"), 2**63 - 1, "h2o"),
        "broken",
        "num_tokens is 9223372036854775807",
    ),
    "the strides of a memory that a call without tokens narrows": Call(
        "chunked_sparse_attention",
        (NO_QUERIES, ONE_KEY, ONE_KEY, Scores((1, 1, 1)), Ints((-1, -1), (1, 1, 2)), None, None,
         None, 0, "h2o,chunk_size=1,local_window=0,heavy_budget=0,sink_tokens=1", None),
        "valid",
    ),
    "logits beyond 2^31": Call("dense_attention", (ROWS, KEYS, VALUES, 2147483647), "valid"),
    "a scale that is infinite in float32": Call(
        "dense_attention", (ROWS, KEYS, VALUES, 1e308), "broken", "scale is 1e308"
    ),
    "no tensor beside one without memory": Call(
        "gather_rows", (None, Filled((), -1, "int32", "meta")), "wild"
    ),
}  # fmt: skip

PROGRAMS = {
    "a cache of sparse tensors": Program(
        (
            Step("ChunkedKVCache", "new", (1, 1, 1)),
            Step("ChunkedKVCache", "append", (0, *[SparseMatrix((1, 1, 0, 1))] * 2)),
        )
    ),
    "two billion layers": Program((Step("MemorySetTracker", "new", (2**31 - 1, 0, 0, 0)),)),
    "a call beyond every prompt": Program(
        (Step("ChunkManager", "new", (1, 2**63 - 1, 1)), Step("ChunkManager", "end", (0,)))
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_call(case, sandbox):
    sandbox(check_call).run(CALLS[case])


@pytest.mark.parametrize("case", PROGRAMS)
def test_program(case, sandbox):
    sandbox(check_program).run(PROGRAMS[case])
