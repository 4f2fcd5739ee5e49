"""`explain`: what each layer is, and what its calls were."""

from __future__ import annotations

import pytest
from hf_helpers import SPARSE

from h2o_prefill import enable, explain


def test_calls_and_rows_are_counted(llama, make_ids):
    with enable(llama, **SPARSE, dense_layers=(1,)) as handle:
        llama(make_ids(2, 72))
        llama(make_ids(1, 5))
        first, second = handle.report()
    assert (first.layer, first.kind, first.mode) == (0, "full_attention", "sparse")
    assert first.reason == ""
    assert (first.sparse_calls, first.sparse_rows) == (1, 144)
    assert (first.dense_calls, first.dense_rows) == (1, 5)
    assert (second.mode, second.reason) == ("dense", "one of dense_layers")
    assert (second.sparse_calls, second.dense_calls, second.dense_rows) == (0, 2, 149)


def test_a_table_says_why(build, ids):
    model = build("gemma3", "eager")
    assert "not enabled" in str(explain(model))
    assert {layer.mode for layer in explain(model)} == {"dense"}
    with enable(model, **SPARSE):
        with pytest.warns(UserWarning, match="output_attentions"):
            model(ids, output_attentions=True)
        sliding, full = explain(model)
        table = str(explain(model)).splitlines()
    assert sliding.reason.startswith("sliding attention, sparse for")
    assert "output_attentions" in full.reason
    assert table[0].startswith("Gemma3ForCausalLM: ") and "chunk_size=16" in table[0]
    assert len(table) == 4 and table[3].endswith(full.reason)
