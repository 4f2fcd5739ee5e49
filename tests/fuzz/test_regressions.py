"""Cases that were found by fuzzing, as it printed them."""

import pytest
from random_calls.calls import Call, check_call
from random_calls.descriptions import Floats, Ints
from random_calls.programs import Program, Step, check_program

NO_QUERIES = Floats((1, 1, 0, 1))
ONE_KEY = Floats((1, 1, 1, 1))
NOTHING = Ints(1, (1, 1, 0, 1), "float32", "sparse")
DENSE = {
    "q": Floats((1, 2, 8, 1)),
    "k": Floats((1, 1, 8, 1), seed=100),
    "v": Floats((1, 1, 8, 1), seed=200),
}

CALLS = {
    "a position beyond every prompt": Call(
        "advance_position_",
        {"position": Ints((0, 0), (2,), "int64"), "num_tokens": 2**63 - 1, "settings": "h2o"},
        "broken",
        "num_tokens is 9223372036854775807",
    ),
    "the strides of a memory that a call without tokens narrows": Call(
        "chunked_sparse_attention",
        {
            **{"q": NO_QUERIES, "k": ONE_KEY, "v": ONE_KEY, "scores": Floats((1, 1, 1))},
            **{"memory": Ints((-1, -1), (1, 1, 2)), "last_chunk_begin": 0},
            "settings": "h2o,chunk_size=1,local_window=0,heavy_budget=0,sink_tokens=1",
        },
        "valid",
    ),
    "values of one dim that cancel": Call(
        "chunked_sparse_attention",
        {
            **{"q": Floats((1, 9, 5, 1), "bfloat16", seed=1)},
            **{"k": Floats((1, 3, 6, 1), "bfloat16", seed=242)},
            **{"v": Floats((1, 3, 6, 1), "bfloat16", seed=1), "last_chunk_begin": 0},
            "settings": "h2o,chunk_size=2,local_window=2,heavy_budget=2,sink_tokens=1,error_rows=1,"
            "max_widen=1",
        },
        "valid",
    ),
    "logits beyond 2^31": Call("dense_attention", {**DENSE, "scale": 2147483647}, "valid"),
    "a scale that is infinite in float32": Call(
        "dense_attention", {**DENSE, "scale": 1e308}, "broken", "scale is 1e308"
    ),
    "no tensor beside one without memory": Call(
        "gather_rows", {"indices": Ints(-1, (), "int32", "meta")}, "wild"
    ),
    "gradients of a state without tokens": Call(
        "chunkwise_linear_attention_backward",
        {
            **{"q": NO_QUERIES, "k": NO_QUERIES, "v": NO_QUERIES, "grad_out": NO_QUERIES},
            **{"grad_state": ONE_KEY, "feature_map": "elu+1", "chunk_size": 64, "causal": True},
            **{"normalize": False},
        },
        "valid",
    ),
}

PROGRAMS = {
    "a cache of sparse tensors": Program(
        (
            Step("ChunkedKVCache", "new", (1, 1, 1)),
            Step("ChunkedKVCache", "append", (0, NOTHING, NOTHING)),
        )
    ),
    "two billion layers": Program((Step("MemorySetTracker", "new", (2**31 - 1, 0, 0, 0)),)),
    "a local window beyond every prompt": Program(
        (Step("MemorySetTracker", "new", (1, 2**63 - 1, 1, 0)),), valid=False
    ),
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
