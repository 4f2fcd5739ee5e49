"""The backend for CUDA on CPU tensors: what stays vLLM's, and that nothing waits for a device."""

from types import SimpleNamespace

import pytest
import torch
from engines import CHUNK, SETTINGS
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn

from h2o_prefill.vllm import cuda, runner
from h2o_prefill.vllm.plan import Row

pytestmark = pytest.mark.parametrize("device", ["cuda"], indirect=True, scope="module")
LENGTH = 3 * CHUNK + 45


@pytest.fixture(scope="module")
def engine(make_engine, folder):
    return make_engine(folder)


def make_builder(engine, device):
    """Make a builder for all layers of an engine; return it and the layers."""
    config = engine.llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context
    layers = {name: x for name, x in layers.items() if isinstance(x, Attention)}
    with set_current_vllm_config(config):
        spec = next(iter(layers.values())).get_kv_cache_spec(config)
        return cuda.Builder(spec, [*layers], config, torch.device(device)), [*layers.values()]


def test_a_batch_gives_what_its_requests_give_alone(engine, tokens):
    asked = [
        (LENGTH, None),
        (40, None),
        (LENGTH, "exact"),
        (2 * CHUNK, SETTINGS),
        (LENGTH, "dense"),
    ]
    prompts = [tokens(length, seed) for seed, (length, _) in enumerate(asked)]
    settings = [text for _, text in asked]
    alone = [engine.ask(x, settings=text) for x, text in zip(prompts, settings, strict=True)]
    engine.forget()
    together, counted = engine.counted(*prompts, settings=settings)
    assert counted == {"sparse_tokens": LENGTH + 2 * CHUNK}
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-4, rtol=1e-4)


def test_rows_of_graphs_are_vllms(engine, tokens):
    support = cuda.Builder.get_cudagraph_support(None, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH
    # After a cached prefix one token is left, as in decoding.
    ids = tokens(4 * CHUNK + 1, 7)
    engine.ask(ids[:-1])
    answer, counted = engine.counted(ids)
    assert answer.cached == 4 * CHUNK and counted == {}


def test_nothing_waits_for_the_device(engine, monkeypatch):
    # Tensors without values in the place of a device's.
    lengths, totals = [1, CHUNK + 3, 2], [50, CHUNK + 3, 2 * CHUNK]
    rows = [Row(1, 0, CHUNK + 3, [])]
    asked = {}
    steps = SimpleNamespace(rows=lambda *lists: asked.setdefault("lists", lists) and rows)
    monkeypatch.setattr(runner, "current", steps)
    starts = torch.tensor([0, 1, CHUNK + 4, CHUNK + 6], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts.to("meta"),
        query_start_loc_cpu=starts,
        seq_lens=torch.empty(3, dtype=torch.int32, device="meta"),
        seq_lens_cpu_upper_bound=torch.tensor(totals),
        num_reqs=3,
        num_actual_tokens=CHUNK + 6,
        max_query_len=CHUNK + 3,
        max_seq_len=2 * CHUNK,
        block_table_tensor=torch.empty(3, 8, dtype=torch.int32, device="meta"),
        slot_mapping=torch.empty(CHUNK + 6, dtype=torch.int64, device="meta"),
    )
    builder, layers = make_builder(engine, "meta")
    plan = builder.build(0, common).h2o_prefill
    assert asked["lists"] == (lengths, totals) and plan.rows is rows
    rest = plan.rest
    assert (rest.num_actual_tokens, rest.max_query_len, len(plan.rest_tokens)) == (3, 2, 3)
    tensors = (rest.query_start_loc, rest.seq_lens, rest.block_table, rest.slot_mapping)
    assert [(x.device.type, len(x)) for x in tensors] == [("meta", x) for x in (3, 2, 2, 3)]
    pages = torch.empty(9, 2, 32, 64, device="meta")
    assert [x.shape for x in cuda.Attention.pages_of(pages)] == 2 * [(9, 2, 32, 32)]
    monkeypatch.setattr(flash_attn.FlashAttentionImpl, "forward", lambda self, *given: given[6])
    query, output = torch.empty(2, CHUNK + 6, 4, 32, device="meta")
    given = layers[0], query, None, None, pages, SimpleNamespace(h2o_prefill=plan), output
    assert layers[0].impl.forward(*given) is output


class NoWaits(TorchDispatchMode):
    """Raises on operators that wait for a device."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.name().removeprefix("aten::")
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "equal"), name
        return operator(*args, **(kwargs or {}))


def test_rows_wait_for_no_device(engine, tokens, monkeypatch):
    def attend(*args):
        with NoWaits():
            return plain(*args)

    plain = Row.attend
    monkeypatch.setattr(Row, "attend", attend)
    engine.forget()
    assert engine.counted(tokens(LENGTH, 11))[1]["sparse_tokens"] == LENGTH
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWaits():
        torch.ones(()).item()


def test_layers_of_drafts_are_vllms(engine, tokens, monkeypatch):
    ids = tokens(LENGTH, 9)
    expected = engine.ask(ids, settings=f"{SETTINGS},dense_layers=2")
    config = type(engine.llm.llm_engine.model_config)
    monkeypatch.setattr(config, "get_total_num_hidden_layers", lambda self: 2)
    layers = make_builder(engine, "cpu")[1]
    assert [layer.impl.is_ours for layer in layers] == [True, True, False]
    answer = engine.ask(ids)
    assert answer.cached == 0
    torch.testing.assert_close(answer.logprobs, expected.logprobs, atol=1e-4, rtol=1e-4)


def test_engines_that_are_refused(engine, monkeypatch):
    config = engine.llm.llm_engine.vllm_config
    ranks = {"world_size": 2, "tensor_parallel_size": 2}
    for fields, heads, reason in [
        ({}, 4, None),
        (ranks, 16, None),
        (ranks, 8, "8 query heads a rank"),
        ({"world_size": 2}, 16, "pipeline or context parallel"),
        ({"decode_context_parallel_size": 2}, 16, "pipeline or context parallel"),
        ({"enable_dbo": True}, 16, "micro-batches"),
    ]:
        with monkeypatch.context() as patch:
            for name, value in fields.items():
                patch.setattr(config.parallel_config, name, value)
            kind = type(config.model_config)
            patch.setattr(kind, "get_num_attention_heads", lambda *_, heads=heads: heads)
            assert runner.refused(config) == reason
    for name, reason in (("LMCache", "the KV connector LMCacheConnector"), ("Nixl", None)):
        transfer = SimpleNamespace(kv_connector=f"{name}Connector")
        monkeypatch.setattr(config, "kv_transfer_config", transfer)
        assert runner.refused(config) == reason
    for method, reason in (("mtp", None), ("draft_model", "a draft model")):
        drafts = SimpleNamespace(method=method)
        monkeypatch.setattr(config, "speculative_config", drafts)
        assert runner.refused(config) == reason
