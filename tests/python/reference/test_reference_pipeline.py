"""Task 6: a whole model."""

from __future__ import annotations

import gc

import pytest
import torch

from h2o_prefill.reference import (
    ChunkedSparseTransformer,
    ChunkManager,
    TransformerConfig,
    apply_rope_global,
    chunked_prefill,
    ops,
    rope_frequencies,
)

S, L, H = 16, 4, 4


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return ChunkedSparseTransformer(TransformerConfig(num_layers=3)).double()


def prompt(tokens, seed=0):
    torch.manual_seed(seed)
    return torch.randint(0, 128, (tokens,))


@torch.no_grad()
def dense_logits(model, ids):
    return model(ids, model.new_cache(len(ids)))


@torch.no_grad()
def run_calls(model, ids, calls, sink_tokens=0):
    """Prefill in calls of the given lengths; return logits, cache and tracker."""
    cache = model.new_cache(len(ids))
    tracker = model.new_tracker(len(ids), L, H, sink_tokens)
    logits = [model(part, cache, tracker, S) for part in ids.split(calls)]
    return torch.cat(logits), cache, tracker


def assert_equal(got, expected, atol=1e-10):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def test_two_identical_inputs_give_identical_outputs(model):
    """Fresh state per forward: compare two identical inputs, another prompt in between."""
    first = chunked_prefill(model, prompt(50), S, L, H)
    chunked_prefill(model, prompt(70, seed=1), S, L, H)
    assert (chunked_prefill(model, prompt(50), S, L, H) == first).all()


@pytest.mark.parametrize("tokens", [0, 1, L - 1, S - 1, S, S + 1, 2 * S - 1, 2 * S, 2 * S + 128])
def test_edge_case_lengths(model, tokens):
    """Edge case handling: N < S, N = S, N = 2S - 1, N = 2S + 128, N < L."""
    ids = prompt(tokens)
    logits = chunked_prefill(model, ids, S, L, H)
    assert logits.shape == (tokens, 128) and logits.isfinite().all()
    if 0 < tokens <= S:
        assert_equal(logits, dense_logits(model, ids))
    if tokens > S:  # the first chunk is dense, and the rest is not
        assert_equal(logits[:S], dense_logits(model, ids[:S]))
    if tokens == 2 * S + 128:
        assert (logits - dense_logits(model, ids)).abs().max() > 1e-3


@pytest.mark.parametrize("tokens", [S // 2, S])
def test_one_chunk_is_the_dense_model(model, tokens):
    """Single-chunk parity: logits equal the dense baseline, with no vote and no memory set."""
    ids = prompt(tokens)
    logits, _, tracker = run_calls(model, ids, tokens)
    assert_equal(logits, dense_logits(model, ids))
    assert tracker.scores.num_updates == [0, 0, 0] and (tracker.memory == -1).all()


def test_a_budget_that_holds_everything_is_the_dense_model(model):
    """Exactness through all layers: K + L + H >= N equals dense."""
    ids = prompt(53)
    for local, heavy, sinks in ((53, 0, 0), (0, 53, 0), (20, 30, 3)):
        logits = chunked_prefill(model, ids, S, local, heavy, sinks)
        assert_equal(logits, dense_logits(model, ids))


def test_sixteen_chunks_have_no_inf_or_nan(model):
    """Stability: 16 chunks, no inf or nan in logits and scores."""
    logits, _, tracker = run_calls(model, prompt(16 * S), 16 * S)
    assert logits.isfinite().all() and tracker.scores.scores.isfinite().all()
    assert tracker.scores.num_updates == [15, 15, 15]


@pytest.mark.parametrize(("tokens", "chunks"), [(S, 1), (S + 1, 2), (3 * S, 3), (3 * S + 1, 4)])
def test_scores_update_once_per_chunk_after_the_first(model, tokens, chunks):
    """Update timing: scores update once per chunk; update count = num_chunks - 1."""
    _, _, tracker = run_calls(model, prompt(tokens), tokens)
    assert tracker.scores.num_updates == [chunks - 1] * 3


def test_the_last_chunk_builds_no_memory_set(model):
    """Final chunk: no memory set is built after it; the set held is the one it attended to."""
    _, _, tracker = run_calls(model, prompt(3 * S + 5), 3 * S + 5)
    assert tracker.last_chunk_begin == [3 * S] * 3
    assert (tracker.memory[..., -1] == 3 * S - 1).all()


def test_repeated_prefills_leave_no_tensor_behind(model):
    """Memory not leaking: the live tensors after many prompts are those after one."""

    def live_bytes():
        gc.collect()
        # Other tests may have left fake tensors, which have no storage to ask for.
        plain = (torch.Tensor, torch.nn.Parameter)
        found = (x for x in gc.get_objects() if type(x) in plain)
        return sum(x.nbytes for x in found if x.layout == torch.strided)

    chunked_prefill(model, prompt(50), S, L, H)
    after_one = live_bytes()
    for seed in range(5):
        chunked_prefill(model, prompt(50, seed), S, L, H)
    assert live_bytes() == after_one


@pytest.mark.parametrize("calls", [[S, 2 * S + 5], [2 * S, S + 5], [S, S, S, 5]])
def test_calls_in_multiples_of_s_equal_one_call(model, calls):
    """Cross-call memory: the memory set is inherited by the next call of the same prompt."""
    ids = prompt(3 * S + 5)
    whole, parts = run_calls(model, ids, 3 * S + 5, 2), run_calls(model, ids, calls, 2)
    assert_equal(parts[0], whole[0])
    assert (parts[2].memory == whole[2].memory).all()
    assert_equal(parts[2].scores.scores, whole[2].scores.scores)


@pytest.mark.parametrize("sink_tokens", [0, 2])
def test_a_changed_token_changes_nothing_before_it(model, sink_tokens):
    """Causality through the whole model: perturbing token t changes no bit before t."""
    ids = prompt(3 * S + 5)
    logits = chunked_prefill(model, ids, S, L, H, sink_tokens)
    for changed in (0, 5, S, 2 * S - 1, 2 * S + 3, 3 * S + 4):
        other = ids.clone()
        other[changed] = (other[changed] + 1) % 128
        after = chunked_prefill(model, other, S, L, H, sink_tokens)
        assert (after[:changed] == logits[:changed]).all()
        assert (after[changed] != logits[changed]).any()


def test_gradients_reach_no_earlier_output(model):
    """Causality through a sparse layer: d out_i / d in_j = 0 for j > i."""
    layer = model.layers[0]
    hidden = torch.randn(2 * S + 3, 64, dtype=torch.float64, requires_grad=True)
    for i in (3, S - 1, S, 2 * S + 1):
        chunks, cache = ChunkManager(0, len(hidden), S), model.new_cache(len(hidden))
        # Later chunks write into the buffer that earlier ones were gathered from.
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            out = layer(hidden, chunks, cache, model.new_tracker(len(hidden), L, H))
            (gradient,) = torch.autograd.grad(out[i].sum(), hidden)
        assert (gradient[i + 1 :] == 0).all()
        assert (gradient[i // S * S : i + 1] != 0).any(-1).all()
        if i >= S:
            assert (gradient[: i // S * S] != 0).any()


def test_decode_attends_to_everything_and_leaves_the_state_alone(model):
    """Decode: full attention over the cache, KV appended at N + t, no change of state."""
    ids = prompt(2 * S + 9)
    cache, tracker = model.new_cache(2 * S + 9), model.new_tracker(2 * S + 9, 2 * S + 9, 0)
    with torch.no_grad():
        logits = [model(ids[: 2 * S + 5], cache, tracker, S)]
        scores, memory = tracker.scores.scores.clone(), tracker.memory.clone()
        for position in range(2 * S + 5, 2 * S + 9):
            assert (cache.buffer[..., position, :] == 0).all()
            logits.append(model(ids[position : position + 1], cache))
            assert cache.length == position + 1
            assert (cache.buffer[..., position, :] != 0).any(-1).all()
    assert_equal(torch.cat(logits), dense_logits(model, ids))  # the prefill's set held everything
    assert (tracker.scores.scores == scores).all() and (tracker.memory == memory).all()


def test_decoded_tokens_are_candidates_of_a_later_prefill(model):
    ids = prompt(2 * S + 3)
    cache, tracker = model.new_cache(2 * S + 3), model.new_tracker(2 * S + 3, 1, S + 1)
    with torch.no_grad():
        model(ids[:S], cache, tracker, S)
        model(ids[S : S + 3], cache)
        model(ids[S + 3 :], cache, tracker, S)
    # Chunk 0 outranks what was never scored; one heavy place is left, the last position is local.
    expected = torch.tensor([*range(S), S, S + 2], dtype=torch.int32)
    assert (tracker.memory == expected).all()


def test_a_layer_equals_the_operator(model):
    """The pipeline of tasks 1 to 5 and the operator's oracle, written independently, agree."""
    layer, tokens = model.layers[0], 3 * S + 5
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 64, dtype=torch.float64)
    attention = layer.self_attn

    def heads(name):
        return (
            attention[name](layer.input_layernorm(hidden)).unflatten(-1, (-1, 16)).transpose(0, 1)
        )

    with torch.no_grad():
        q, k = apply_rope_global(heads("q_proj"), heads("k_proj"), 0, tokens, rope_frequencies(16))
        out, scores, memory = ops.chunked_sparse_attention(
            *(x.unsqueeze(0) for x in (q, k, heads("v_proj"))),
            *[None] * 5,
            0,
            S,
            L,
            H,
            sink_tokens=2,
        )
        residual = hidden + attention["o_proj"](out[0].transpose(0, 1).flatten(1))
        normed = layer.post_attention_layernorm(residual)
        gate = torch.nn.functional.silu(layer.mlp["gate_proj"](normed))
        expected = residual + layer.mlp["down_proj"](gate * layer.mlp["up_proj"](normed))

        cache, tracker = model.new_cache(tokens), model.new_tracker(tokens, L, H, 2)
        got = layer(hidden, ChunkManager(0, tokens, S), cache, tracker)
    assert_equal(got, expected)
    assert (tracker.memory[0] == memory[0]).all()
    assert_equal(tracker.scores.scores[0], scores[0])
    assert_equal(cache.layer(0)[0], k)


@pytest.mark.parametrize("tied", [True, False])
def test_dense_parity_with_the_llama_of_transformers(tied):
    """End-to-end correctness: with a budget that holds everything the model is Llama."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours = TransformerConfig(tie_embeddings=tied)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=ours.vocab_size,
            hidden_size=ours.hidden_size,
            intermediate_size=ours.intermediate_size,
            num_hidden_layers=ours.num_layers,
            num_attention_heads=ours.num_heads,
            num_key_value_heads=ours.num_kv_heads,
            head_dim=ours.head_dim,
            rms_norm_eps=ours.rms_norm_eps,
            tie_word_embeddings=tied,
            initializer_range=0.3,
        )
    ).eval()
    model = ChunkedSparseTransformer(ours)
    weights = {name.removeprefix("model."): value for name, value in theirs.state_dict().items()}
    model.load_state_dict(weights)
    ids = prompt(3 * S + 5).unsqueeze(0)
    with torch.no_grad():
        expected = theirs(ids).logits
    assert_equal(chunked_prefill(model, ids, S, 4 * S, 0), expected, atol=1e-4)
    assert (chunked_prefill(model, ids, S, L, H) - expected).abs().max() > 1e-2


def test_shapes_follow_the_input_and_several_prompts_are_refused(model):
    ids = prompt(20)
    assert chunked_prefill(model, ids, S, L, H).shape == (20, 128)
    assert chunked_prefill(model, ids[None], S, L, H).shape == (1, 20, 128)
    with pytest.raises(ValueError, match=r"input_ids must be \[N\] or \[1, N\], got \[2, 20\]"):
        chunked_prefill(model, torch.stack([ids, ids]), S, L, H)
    with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
        chunked_prefill(model, ids, 0, L, H)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="multiple of num_kv_heads, got 4 and 3"):
        TransformerConfig(num_kv_heads=3)
