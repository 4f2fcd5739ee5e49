"""Linear attention as a function and as a module: states, scripts, feature maps, training."""

import copy

import pytest
import torch
import torch.nn.functional as F
from op_testing import Shape, make_qkv, saved_and_loaded

from h2o_prefill import ChunkwiseLinearAttention, linear_attention, ops
from h2o_prefill.linear import LinearAttentionState


def make_module(**options):
    torch.manual_seed(0)
    return ChunkwiseLinearAttention(32, 4, 2, chunk_size=8, **options)


def test_a_callable_feature_map_is_applied_to_queries_and_keys():
    q, k, v = make_qkv(Shape(1, 4, 2, 30, 8, 6))
    out, state = linear_attention(q, k, v, feature_map=lambda x: F.elu(x) + 1, normalize=True)
    assert isinstance(state, LinearAttentionState)
    expected = ops.chunkwise_linear_attention(q, k, v, normalize=True)
    torch.testing.assert_close((out, *state), expected)
    wider, state = linear_attention(q, k, v, feature_map=lambda x: torch.cat([x.relu(), x**2], -1))
    assert wider.shape == out.shape and state.state.shape == (1, 2, 16, 6)


@pytest.mark.parametrize("normalize", [False, True])
def test_a_module_decodes_as_it_prefills(normalize):
    module = make_module(normalize=normalize, log_decay=torch.tensor([-0.1, -0.01]))
    hidden = torch.randn(2, 21, 32)
    with torch.no_grad():
        whole, _, _ = module(hidden)
        out, *state = module(hidden[:, :15])
        outs = [out]
        for i in range(15, 21):
            out, *state = module(hidden[:, i : i + 1], *state)
            outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("log_decay", [None, torch.tensor([-0.1, -0.2])])
def test_a_module_is_scripted_copied_and_saved(log_decay):
    module = make_module(log_decay=log_decay)
    hidden = torch.randn(1, 20, 32)
    expected = module(hidden)
    scripted = torch.jit.script(module)
    for other in (scripted, saved_and_loaded(scripted, torch.jit), copy.deepcopy(module)):
        torch.testing.assert_close(other(hidden), expected, rtol=0, atol=0)
    if log_decay is not None:
        assert "log_decay" in module.state_dict()


def test_heads_must_divide():
    with pytest.raises(ValueError, match=r"num_heads must divide hidden_size \(32\), got 5"):
        ChunkwiseLinearAttention(32, 5)
    with pytest.raises(ValueError, match=r"num_kv_heads must divide num_heads \(4\), got 3"):
        ChunkwiseLinearAttention(32, 4, 3)
