"""Values that may stand for any argument, whatever it should be."""

from __future__ import annotations

from typing import Any

from fuzz.arguments import Filled, Floats, Ints, SparseMatrix
from hypothesis import strategies as st

INTEGERS = (0, 1, -1, 2, 7, 64, 2**22, 2**31 - 1, 2**31, -(2**31), 2**32 + 1, 2**63 - 1, -(2**63))

integers = st.one_of(st.sampled_from(INTEGERS), st.integers(-3, 300))

shapes = st.lists(st.sampled_from([0, 1, 2, 3, 8, 17]), max_size=5).map(tuple)

tensors = st.one_of(
    st.builds(
        Floats,
        shapes,
        st.sampled_from(["float32", "bfloat16", "float16", "float64", "complex64"]),
        st.sampled_from(["contiguous", "transposed", "sliced", "offset"]),
        st.sampled_from(["normal", "zeros", "huge", "inf", "nan"]),
    ),
    st.builds(
        Filled,
        shapes,
        st.sampled_from([-1, 0, 1, 5]),
        st.sampled_from(["int32", "int64", "uint8", "bool", "float32"]),
        st.sampled_from(["cpu", "cpu", "meta"]),
    ),
    st.lists(integers.filter(lambda i: -(2**31) <= i < 2**31), max_size=6).map(
        lambda values: Ints(tuple(values), (1, 1, len(values)))
    ),
    st.builds(SparseMatrix, shapes),
)

texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        [
            "h2o",
            "spec",
            "recommended",
            "h2o,",
            "h2o,,",
            "=",
            "h2o,chunk_size=1,min_prefill=1",
            "h2o,chunk_size=2147483647",
            "h2o,dense_layers=" + "+".join("9" * 400),
            "h2o,local_window=4194304,heavy_budget=4194304,sink_tokens=4194304",
            "h2o,chunk_size=\x00",
        ]
    ),
)

floats = st.sampled_from([0.0, -1.0, 1e308, -1e-308, float("nan"), float("inf")])

anything: st.SearchStrategy[Any] = st.one_of(st.none(), integers, tensors, texts, floats)
