"""A whole decoder."""

import pytest
import torch

import h2o_prefill
from h2o_prefill import PrefillConfig
from h2o_prefill.reference import ChunkedSparseTransformer, TransformerConfig, chunked_prefill

S = 16
CONFIG = PrefillConfig(chunk_size=S, local_window=4, heavy_budget=4)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return ChunkedSparseTransformer(TransformerConfig(num_layers=3)).double()


def random_ids(tokens):
    torch.manual_seed(0)
    return torch.randint(0, 128, (tokens,))


@torch.no_grad()
def run(model, ids, *calls):
    """Run calls of (tokens, settings); return the logits of all and the prompt's state."""
    prompt = model.new_prompt(len(ids))
    parts = ids.split([tokens for tokens, _ in calls])
    logits = [
        model(part, prompt, settings) for part, (_, settings) in zip(parts, calls, strict=True)
    ]
    return torch.cat(logits), prompt


def assert_equal(got, expected, atol=1e-10):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def test_calls_in_multiples_of_s_equal_one_call_and_the_last_chunk_builds_no_set(model):
    config = CONFIG.replace(sink_tokens=2)
    whole, state = run(model, random_ids(3 * S + 5), (3 * S + 5, config))
    assert state.last_chunk_begin == 3 * S
    assert all((memory[..., -1] == 3 * S - 1).all() for _, memory, _ in state.state.values())
    for calls in ([S, 2 * S + 5], [2 * S, S + 5], [S, S, S, 5]):
        logits, prompt = run(model, random_ids(3 * S + 5), *((n, config) for n in calls))
        assert_equal(logits, whole)
        assert all(torch.equal(prompt.state[i][1], state.state[i][1]) for i in range(3))


@pytest.mark.filterwarnings("ignore:the memory set")
def test_decode_attends_to_everything_and_leaves_scores_and_sets_alone(model):
    ids, everything = random_ids(2 * S + 9), CONFIG.replace(local_window=2 * S + 9)
    _, before = run(model, ids[: 2 * S + 5], (2 * S + 5, everything))
    logits, prompt = run(model, ids, (2 * S + 5, everything), *[(1, None)] * 4)
    assert_equal(logits, run(model, ids, (len(ids), None))[0])
    assert prompt.length == 2 * S + 9 and (prompt.cache != 0).any(-1).all()
    for layer in range(3):
        assert all(map(torch.equal, prompt.state[layer], before.state[layer]))


@pytest.fixture
def llama():
    """Make a model, and the Llama of transformers with its weights."""
    transformers = pytest.importorskip("transformers")

    def make(tied):
        torch.manual_seed(0)
        ours = TransformerConfig(tie_embeddings=tied)
        same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps")
        theirs = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **{name: getattr(ours, name) for name in same},
                num_hidden_layers=ours.num_layers,
                num_attention_heads=ours.num_heads,
                num_key_value_heads=ours.num_kv_heads,
                tie_word_embeddings=tied,
                initializer_range=0.3,
            )
        ).eval()
        model = ChunkedSparseTransformer(ours)
        state = theirs.state_dict().items()
        model.load_state_dict({name.removeprefix("model."): value for name, value in state})
        return model, theirs

    return make


RECALL = CONFIG.replace(recall=2)


@pytest.mark.parametrize(
    "config", [CONFIG, RECALL, RECALL.replace(dense_layers=(0,), dense_tail=3), "exact"]
)
def test_a_sparse_model_is_the_enabled_llama(llama, config):
    model, theirs = llama(tied=config != "exact")
    ids = random_ids(5 * S + 5) % 30
    with h2o_prefill.enable(theirs, config), torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    assert_equal(chunked_prefill(model, ids, config), expected, atol=1e-4)
    if config is RECALL:
        assert (chunked_prefill(model, ids, CONFIG) - expected).abs().max() > 1e-2
