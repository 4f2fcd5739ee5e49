"""Padded batches: dense, every row what transformers gives, with one warning of it."""

import warnings
from contextlib import nullcontext

import pytest
import torch
import transformers
from hf_helpers import (
    EXACT,
    GREEDY,
    H2O,
    PRESET_EXACT,
    RECOMMENDED,
    assert_close,
    new_cache,
    sparse_rows,
    stock_copy,
    watch,
)

from h2o_prefill import ChunkedPrefillCache, enable, explain

MODELS = ["llama", "qwen3", "gpt2", "gemma2", "gemma3", "gpt-oss", "mistral"]
LENGTHS = (72, 40, 9, 40)  # one row is shorter than a chunk
PADDED = "attention_mask hides tokens .*one by one"


class Batch:
    """Rows of different lengths in one padded batch."""

    def __init__(self, rows, side):
        longest = max(row.shape[1] for row in rows)
        length = longest + (7 if side in ("both", "holes") else 0)
        self.rows, self.spans = rows, []
        self.ids = torch.zeros(len(rows), length, dtype=torch.long)
        self.mask = torch.zeros_like(self.ids)
        for index, row in enumerate(rows):
            size = row.shape[1]
            begin = {"left": length - size, "right": 0}.get(side, (length - size) // 2)
            self.spans.append(slice(begin, begin + size))
            self.ids[index, self.spans[-1]] = row
            self.mask[index, self.spans[-1]] = 1
        if side == "holes":
            self.mask[3, self.spans[3].start + 4] = 0
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)

    @property
    def arguments(self):
        return {"input_ids": self.ids, "attention_mask": self.mask, "position_ids": self.positions}

    def real(self, out):
        """Return what belongs to tokens that are no padding."""
        return out[self.mask.bool()]


@pytest.fixture
def make_batch(make_ids):
    """Return a function that makes a batch."""

    def make(side, lengths=LENGTHS):
        return Batch([make_ids(1, n, seed=20 + i) for i, n in enumerate(lengths)], side)

    return make


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("settings", [H2O, PRESET_EXACT], ids=["h2o", "exact"])
@pytest.mark.parametrize(
    ("name", "side"),
    [
        *((x, "left") for x in (*MODELS, "llama4", "qwen2-window", "deepseek-v3")),
        *(("gpt2", x) for x in ("right", "both", "holes")),
    ],
)
def test_rows_attend_densely_by_our_kernel_and_it_is_said_once(
    build, make_batch, monkeypatch, implementation, settings, name, side
):
    model, batch = build(name, implementation), make_batch(side)
    stock = model(**batch.arguments).logits
    seen = watch(monkeypatch, "dense_attention", lambda q, *_: q.shape[::2])
    said = settings is H2O
    with enable(model, **settings):
        with pytest.warns(UserWarning, match=PADDED) if said else nullcontext() as caught:
            ours = model(**batch.arguments).logits
            model(**batch.arguments)
        assert not said or len(caught) == 1
        assert any("one by one" in layer.reason for layer in explain(model)) == said
        assert sum(sparse_rows(model)) == 0
    assert_close(batch.real(ours), batch.real(stock), 1e-4)
    # Rows in the same place go together.
    assert ours.isfinite().all() and (side == "holes" or {(1, 72), (1, 9), (2, 40)} <= set(seen))
    if said:
        refused = pytest.raises(NotImplementedError, match=PADDED)
        with enable(model, strict=True, **settings), refused:
            model(**batch.arguments)


def test_rows_attend_to_all_of_other_states_of_their_length(build, make_batch):
    model, batch = build("gpt2", add_cross_attention=True), make_batch("left")
    states = torch.randn(4, 72, 32, generator=torch.Generator().manual_seed(5))
    arguments = {**batch.arguments, "encoder_hidden_states": states, "use_cache": False}
    stock = model(**arguments).logits
    with enable(model, **EXACT), pytest.warns(UserWarning, match=PADDED):
        ours = model(**arguments).logits
    assert_close(batch.real(ours), batch.real(stock))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_that_is_all_padding_is_finite_and_changes_nothing(build, make_batch, name, dtype):
    warnings.filterwarnings("ignore", message=f"h2o_prefill: .*{PADDED}")
    model, batch = build(name).to(getattr(torch, dtype)), make_batch("right")
    with enable(model, **H2O):
        expected = model(**batch.arguments).logits
        batch.mask[2] = 0
        ours = model(**batch.arguments).logits
        batch.mask, mask = torch.zeros_like(batch.mask), batch.mask
        assert ours.isfinite().all() and model(**batch.arguments).logits.isfinite().all()
    assert_close(ours[mask.bool()], expected[mask.bool()])


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_stock(llama, make_batch, checkpointing):
    batch = make_batch("left")
    labels = batch.ids.masked_fill(batch.mask == 0, -100)
    weight = llama.model.layers[0].self_attn.q_proj.weight
    llama.train()
    if checkpointing:
        llama.gradient_checkpointing_enable()

    def gradient():
        llama.zero_grad()
        llama(**batch.arguments, labels=labels, use_cache=False).loss.backward()
        return weight.grad.clone()

    with torch.enable_grad():
        stock = gradient()
        with enable(llama, **H2O), pytest.warns(UserWarning, match="training mode"):
            assert_close(gradient(), stock)


@pytest.mark.parametrize(
    ("name", "own_cache"), [*((x, False) for x in MODELS), ("llama", True), ("gemma3", True)]
)
def test_generate_gives_what_the_model_gives(build, make_batch, name, own_cache):
    model, batch = build(name), make_batch("left")

    def generate(**cache):
        found = model.generate(
            batch.ids,
            attention_mask=batch.mask,
            **{**GREEDY, **cache},
            return_dict_in_generate=True,
            output_logits=True,
        )
        return found.sequences, torch.stack(found.logits, dim=1)

    stock, expected = generate()
    model.requires_grad_(False)
    with torch.enable_grad(), enable(model, **RECOMMENDED):
        with pytest.warns(UserWarning, match=PADDED):
            ours, logits = generate(**({"past_key_values": new_cache(model)} if own_cache else {}))
        assert sum(sparse_rows(model)) == 0
    assert torch.equal(ours, stock)
    assert_close(logits, expected, 1e-4)


@pytest.mark.parametrize("new", [1, 7, 40])
@pytest.mark.parametrize(
    ("implementation", "own_cache", "masked"),
    [("sdpa", True, True), ("sdpa", False, False), ("eager", False, True)],
)
def test_later_calls_are_dense_as_long_as_the_mask_hides_tokens(
    build, make_batch, make_ids, implementation, own_cache, masked, new
):
    model, batch = build("llama", implementation), make_batch("left" if masked else "right")
    more = make_ids(4, new, seed=9)
    mask = torch.cat([batch.mask, torch.ones_like(more)], dim=1)
    positions = batch.positions[:, -1:] + 1 + torch.arange(new)
    arguments = {"attention_mask": mask, "position_ids": positions} if masked else {}
    kind = ChunkedPrefillCache if own_cache else transformers.DynamicCache
    warnings.filterwarnings("ignore", message=f"h2o_prefill: .*{PADDED}")
    with enable(model, **EXACT):
        cache = model(**batch.arguments, past_key_values=kind(config=model.config))
        cache = cache.past_key_values
        plain = stock_copy(cache, model.config)
        ours = model(more, past_key_values=cache, **arguments).logits
        assert sparse_rows(model) == [4 * 40 * (not masked and new == 40)] * 2
    assert_close(ours, model(more, past_key_values=plain, **arguments).logits)
