"""Errors of sparse attention, layer by layer, against softmaxes over all pairs of positions."""

from functools import partial

import pytest
import torch

from h2o_prefill import reference
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import measure_attention, observe
from h2o_prefill.eval.attention import measure_layer
from h2o_prefill.eval.attention_flops import find_recalled
from h2o_prefill.eval.timing import peak_bytes
from h2o_prefill.reference.recall import lexical_recall

LENGTH = 72  # four chunks of 16 tokens and one of 8
ENDS = (16, 32, 48, 64, 72)
CONFIG = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4)
# Few words, so that there is something to recall.
PROMPT = torch.randint(1, 9, (1, LENGTH), generator=torch.Generator().manual_seed(5))
PLAIN = (None, None, 0.0)
SINKS = torch.linspace(-1, 3, 6, dtype=torch.float64)


def _layer(query_heads=6, kv_heads=2):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(1, heads, LENGTH, 8, generator=generator, dtype=torch.float64)
        for heads in (query_heads, kv_heads, kv_heads)
    ]


def _brute_force(layer, config, options=PLAIN):
    """Return |sparse - dense| and |dense| [Hq, T] and the dense mass on visible keys [Hq, T]."""
    q, k, v = (x.double() for x in layer)
    scale, sinks, softcap = options
    lists = lexical_recall(PROMPT, 0, config) if config.recall else (None, None, None)
    logits = {"scale": scale, "sinks": sinks, "softcap": softcap}
    attend = partial(reference.ops.chunked_sparse_attention, settings=config, **logits)
    # With the unit matrix as values, attention returns its weights: over all pairs at once.
    unit = torch.eye(LENGTH, dtype=torch.float64).expand(1, k.shape[1], -1, -1)
    sparse = attend(q, k, v, None, None, *lists, 0)[0][0]
    visible = attend(q, k, unit, None, None, *lists, 0)[0][0] > 0
    dense = reference.ops.dense_attention(q, k, v, scale, sinks, softcap)[0]
    weights = reference.ops.dense_attention(q, k, unit, scale, None, softcap)[0]
    return (sparse - dense).abs().sum(-1), dense.abs().sum(-1), (weights * visible).sum(-1)


def _by_chunk(rows):
    """Sum [Hq, T] over the rows of each chunk, [chunks, Hq]."""
    return torch.stack([part.sum(-1) for part in rows.tensor_split(ENDS[:-1], dim=-1)])


@pytest.mark.parametrize(
    ("changes", "heads", "options"),
    [
        ({}, (4, 4), (0.9, None, 0.0)),
        ({}, (4, 1), PLAIN),
        ({}, (6, 2), (None, SINKS, 1.5)),
        ({"sink_tokens": 2, "gqa_reduce": "max"}, (6, 2), PLAIN),
        ({"dense_tail": 100}, (6, 2), PLAIN),
        ({"recall": 1, "dense_tail": 5}, (6, 2), PLAIN),
        ({"local_window": 30, "heavy_budget": 80}, (6, 2), PLAIN),
    ],
)
@pytest.mark.filterwarnings("ignore:the memory set")
def test_a_layer_against_softmaxes_over_all_pairs(changes, heads, options):
    config, layer = CONFIG.replace(**changes), _layer(*heads)
    difference, size, mass = _brute_force(layer, config, options)
    expected = map(_by_chunk, (difference, size, mass))
    found = measure_layer(*layer, config, find_recalled(PROMPT, config), options)
    for ours, theirs in zip(found, expected, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_memory_stays_bounded():
    layer = [torch.randn(1, heads, 2048, 8) for heads in (4, 2, 2)]
    config = PrefillConfig(chunk_size=64, local_window=8, heavy_budget=8)
    one_matrix = 4 * 2048 * 2048
    assert peak_bytes(lambda: measure_layer(*layer, config)) < one_matrix


def test_a_model_against_softmaxes_over_all_pairs(tiny_model):
    layers = []
    note = lambda call, _: layers.append([call.query, call.key, call.value])  # noqa: E731
    with torch.no_grad(), observe.observe_attention(tiny_model, note):
        tiny_model(PROMPT)
    config = CONFIG.replace(recall=2, dense_tail=12)
    measures = measure_attention(tiny_model, PROMPT, config)
    assert measures.layers == (0, 1) and measures.chunk_ends == ENDS
    assert measures.l1_error.amin() > 0.001 and measures.mass_recall.amax() < 0.999
    for row, layer in enumerate(layers):
        difference, size, mass = _brute_force(layer, config)
        for name, value in {
            "l1_error": difference.sum(-1) / size.sum(-1),
            "mass_recall": mass.mean(-1),
            "l1_error_by_chunk": _by_chunk(difference) / _by_chunk(size),
        }.items():
            found = getattr(measures, name)[..., row, :].double()
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-6)

    for chunk, *head in torch.cartesian_prod(*(torch.arange(n) for n in (4, 2, 2))).tolist():
        sets = (measures.memory[(c, *head)].tolist() for c in (chunk, chunk + 1))
        one, other = ({x for x in held if x >= 0} for held in sets)
        expected = pytest.approx(len(one & other) / len(one | other))
        assert measures.jaccard[(chunk, *head)].item() == expected

    values = measures.to_dict()
    assert [row["jaccard_mean"] for row in values["by_chunk"][:2]] == [None, None]
    # Chunk 2 attends to the set after chunk 1, chunk 1 to that after chunk 0.
    third = values["by_chunk"][2]
    assert third["jaccard_mean"] == pytest.approx(measures.jaccard[0].mean().item())
    assert third["l1_error_mean"] == pytest.approx(measures.l1_error_by_chunk[2].mean().item())


def test_dense_and_uneven_layers(tiny, tiny_model):
    narrow = measure_attention(tiny_model, PROMPT, CONFIG)
    fewer = measure_attention(tiny_model, PROMPT, CONFIG.replace(dense_layers=(0,)))
    assert fewer.layers == (1,) and torch.equal(fewer.l1_error, narrow.l1_error[1:])

    uneven = measure_attention(tiny.make_uneven_model(), PROMPT, CONFIG)
    assert uneven.kv_heads == (2, 1)
    assert uneven.l1_error[1].isnan().tolist() == [False, False, True, True]
    assert uneven.jaccard[:, 1].isnan().tolist() == [[False, True]] * 4
    assert (uneven.memory[:, 1, 1] == -1).all()
    # All the heads of a layer hold the local window, and a share of them each other position.
    share = uneven.head_share(4)
    assert (share[:, -4:] == 1).all()
    held = torch.isin(torch.arange(LENGTH), uneven.memory[4, 1, 0]).float()
    assert torch.equal(share[1], held) and share[0].sum() == 8
    values = uneven.to_dict()
    known = uneven.l1_error[~uneven.l1_error.isnan()]
    assert values["summary"]["l1_error_mean"] == pytest.approx(known.mean().item())
    assert values["summary"]["l1_error_worst"]["value"] == pytest.approx(known.amax().item())


def test_a_model_is_left_as_it_was(tiny_model):
    tiny_model.train()

    def fail(done, total, what):
        if done == 1:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        measure_attention(tiny_model, PROMPT, CONFIG, on_progress=fail)
    # The layers found so far are not kept alive.
    assert observe._observer.get() is None
    assert tiny_model.training and tiny_model.config._attn_implementation == "sdpa"
