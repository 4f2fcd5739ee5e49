"""`explain`: the kind of each layer, and how its calls attended."""

import pytest
import torch
from hf_helpers import SPARSE

from h2o_prefill import enable, estimated_kl, explain


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


def test_equal_layers_are_one_row(build, make_ids):
    model = build("llama", num_hidden_layers=5)
    with enable(model, **SPARSE, dense_layers=(3,), error_rows=4) as handle:
        model(make_ids(1, 72))
        lines = str(handle.report()).splitlines()
        errors = sorted(x.error for x in handle.report().layers[1:3])
    assert [line.split()[0] for line in lines[2:5]] == ["0-2", "3", "4"]
    assert f"{errors[0]:.4f} to {errors[1]:.4f}" in lines[2]


def test_errors_and_the_estimate_of_the_last_prompt(llama, make_ids):
    assert explain(llama).estimated_kl is None
    with enable(llama, **SPARSE, error_rows=4) as handle:
        llama(make_ids(2, 72))
        report = handle.report()
        measured = handle.state.errors[1]
    assert report.layers[0].error is None  # not measured in the first layer
    assert report.layers[1].error == pytest.approx((measured[..., 1] / 4).mean().item())
    # Four of five chunks have others before them.
    each = 0.8 * (measured[..., 1] / 4).mean(1)
    whole = estimated_kl([torch.tensor([[[0, 1.0, 1, 1]]])], handle.config).item() / 0.5
    assert report.estimated_kl == pytest.approx((whole * each).tolist())
    assert "of the last prompt: " + ", ".join(f"{x:.4f}" for x in report.estimated_kl) in str(
        report
    )
    nothing = [torch.zeros(1, 2, 4)]
    assert torch.isnan(estimated_kl(nothing, handle.config.replace(error_rows=0))).all()


def test_a_table_says_why(build, ids):
    model = build("gemma3", "eager")
    assert "not enabled" in str(explain(model))
    assert {layer.mode for layer in explain(model)} == {"dense"}
    with enable(model, **SPARSE):
        with pytest.warns(UserWarning, match="output_attentions"):
            model(ids, output_attentions=True)
        sliding, full = explain(model)
        table = str(explain(model)).splitlines()
    assert sliding.reason.startswith("sliding attention, exact; sparse for")
    assert "output_attentions" in full.reason
    assert table[0].startswith("Gemma3ForCausalLM: ") and "chunk_size=16" in table[0]
    assert len(table) == 4 and table[3].endswith(full.reason)
