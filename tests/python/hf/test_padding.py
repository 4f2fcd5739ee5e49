"""Padded batches: every row equals the row alone, whatever lies beside and around it."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import transformers
from hf_helpers import (
    EVERYTHING,
    EXACT,
    GREEDY,
    H2O,
    RECOMMENDED,
    assert_close,
    failing,
    in_calls,
    new_cache,
    stock_copy,
    watch,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from h2o_prefill import ChunkedPrefillCache, enable
from h2o_prefill.hf.kinds import row_spans

MODELS = ["llama", "qwen3", "gpt2", "gemma2", "gemma3", "gpt-oss", "mistral"]
SIDES = ["left", "right", "both"]
LENGTHS = (72, 40, 9, 55)  # one row is shorter than a chunk
CONTINUES = "a long call goes on from a padded batch"
HOLES = "attention_mask has holes"


class Batch:
    """Rows of different lengths in one padded batch."""

    def __init__(self, rows, side):
        longest = max(row.shape[1] for row in rows)
        length = longest + (7 if side == "both" else 0)
        self.rows, self.spans = rows, []
        self.ids = torch.zeros(len(rows), length, dtype=torch.long)
        self.mask = torch.zeros_like(self.ids)
        for index, row in enumerate(rows):
            size = row.shape[1]
            begin = {"left": length - size, "right": 0, "both": (length - size) // 2}[side]
            self.spans.append(slice(begin, begin + size))
            self.ids[index, self.spans[-1]] = row
            self.mask[index, self.spans[-1]] = 1
        self.positions = (self.mask.cumsum(1) - 1).clamp(min=0)

    @property
    def arguments(self):
        return {"input_ids": self.ids, "attention_mask": self.mask, "position_ids": self.positions}

    def cut(self, out):
        """Return what belongs to each row, without padding."""
        return [out[index, span] for index, span in enumerate(self.spans)]


@pytest.fixture
def make_batch(make_ids):
    """Return a function that makes a batch; its rows repeat themselves, so recall finds keys."""

    def make(side, lengths=LENGTHS):
        # Of different periods, so that the recalled keys of one row are wrong in another.
        rows = [
            make_ids(1, 11 + 3 * i, seed=20 + i).repeat(1, 7)[:, :n] for i, n in enumerate(lengths)
        ]
        return Batch(rows, side)

    return make


def assert_rows_close(batch, out, expected, tolerance=1e-5):
    assert_close(batch.cut(out), list(expected), tolerance)


def check_rows(model, batch, sparse_layers):
    """Assert that each row equals the row alone; return the layers that were sparse and logits."""
    expected = [model(row).logits[0] for row in batch.rows]
    alone = sorted(sparse_layers)
    sparse_layers.clear()
    ours = model(**batch.arguments).logits
    assert_rows_close(batch, ours, expected)
    assert sorted(sparse_layers) == alone and ours.isfinite().all()
    return alone, ours


@pytest.mark.parametrize("options", [H2O, EVERYTHING], ids=["h2o", "all"])
@pytest.mark.parametrize(
    ("name", "side"),
    [
        *((x, "left") for x in (*MODELS, "llama4", "qwen2-window", "deepseek-v3")),
        *(("gpt2", x) for x in SIDES[1:]),
    ],
)
def test_every_row_is_what_it_is_alone(build, make_batch, sparse_layers, name, side, options):
    model, batch = build(name), make_batch(side)
    stock = model(**batch.arguments).logits
    with enable(model, strict=True, **options):
        alone, ours = check_rows(model, batch, sparse_layers)
    assert set(alone) == {72, 40, 55}
    for index in (0, 1, 3):
        assert (batch.cut(ours)[index] - batch.cut(stock)[index]).abs().amax() > 1e-2


@pytest.mark.parametrize(
    ("implementation", "settings", "layers"),
    [
        ("sdpa", {"dense_layers": (0,)}, [40, 55, 72]),
        ("eager", {"dense_layers": (0,)}, [40, 55, 72]),
        ("sdpa", {"min_prefill": 55}, [55, 55, 72, 72]),
    ],
)
@pytest.mark.parametrize("side", SIDES)
def test_padded_rows_match_single_rows_when_partly_dense(
    build, make_batch, sparse_layers, side, implementation, settings, layers
):
    with enable(model := build("llama", implementation), strict=True, **{**H2O, **settings}):
        alone, _ = check_rows(model, make_batch(side), sparse_layers)
    assert alone == layers


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_without_position_ids_a_row_has_the_positions_of_its_place(build, make_batch, name, side):
    """Rotary models see distances alone; learned positions are those that stock gives."""
    model, batch = build(name), make_batch(side)
    with enable(model, strict=True, **H2O):
        ours = model(batch.ids, attention_mask=batch.mask).logits
        expected = [
            model(row, position_ids=torch.arange(span.start, span.stop)[None]).logits[0]
            for row, span in zip(batch.rows, batch.spans, strict=True)
        ]
    assert_rows_close(batch, ours, expected, 1e-4)


@pytest.mark.parametrize(("name", "side"), [("llama", "left"), ("gpt-oss", "right")])
def test_the_preset_exact_attends_to_rows_by_our_kernel(build, make_batch, monkeypatch, name, side):
    model, batch = build(name), make_batch(side)
    expected = [model(row).logits[0] for row in batch.rows]
    seen = watch(monkeypatch, "dense_attention", lambda q, *_: q.shape[2])
    with enable(model, "exact", strict=True, chunk_size=16):
        assert_rows_close(batch, model(**batch.arguments).logits, expected)
    assert set(seen) == set(LENGTHS)


def test_the_mask_of_dense_layers_is_made_once_and_only_if_needed(build, make_batch, monkeypatch):
    made = []

    def watched(**arguments):
        made.append(arguments["batch_size"])
        return sdpa_mask(**arguments)

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, "sdpa", watched)
    model, batch = build("llama", num_hidden_layers=3), make_batch("left")
    with enable(model, strict=True, **H2O):
        model(**batch.arguments)
        assert made == []
    with enable(model, strict=True, dense_layers=(0, 2), **H2O):
        model(**batch.arguments)
    assert made == [4]


def test_rows_attend_to_all_of_other_states_of_their_length(build, make_batch, sparse_layers):
    model, batch = build("gpt2", add_cross_attention=True), make_batch("left")
    states = torch.randn(4, 72, 32, generator=torch.Generator().manual_seed(5))
    arguments = {**batch.arguments, "encoder_hidden_states": states, "use_cache": False}
    stock = model(**arguments).logits
    with enable(model, strict=True, **EXACT):
        ours = model(**arguments).logits
    assert_rows_close(batch, ours, batch.cut(stock))
    assert sorted(sparse_layers) == [40, 40, 55, 55, 72, 72]


@pytest.mark.parametrize("options", [H2O, {**RECOMMENDED, "dense_layers": (0,)}])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_that_is_all_padding_is_finite_and_changes_nothing(
    build, make_batch, name, options, dtype
):
    model, batch = build(name).to(getattr(torch, dtype)), make_batch("right")
    arguments = batch.arguments
    with enable(model, strict=True, **options):
        expected = model(**arguments).logits
        arguments["attention_mask"][2] = 0
        ours = model(**arguments).logits
    assert ours.isfinite().all()
    for index in (0, 1, 3):
        span = batch.spans[index]
        assert_close(ours[index, span], expected[index, span])


def test_a_batch_of_nothing_but_padding_is_dense(llama, make_ids, sparse_layers):
    ids = make_ids(2, 40)
    with enable(llama, strict=True, **H2O):
        assert llama(ids, attention_mask=torch.zeros_like(ids)).logits.isfinite().all()
    assert sparse_layers == []


@pytest.mark.parametrize("order", [(50, 50, 72), (50, 72, 50)], ids=["neighbours", "apart"])
def test_rows_in_the_same_place_go_together(llama, make_batch, monkeypatch, order):
    batch = make_batch("left", order)
    with enable(llama, strict=True, **RECOMMENDED):
        expected = [llama(row).logits[0] for row in batch.rows]
        seen = watch(monkeypatch, "chunked_sparse_attention", lambda q, *_: q.shape[::2])
        ours = llama(**batch.arguments).logits
    assert sorted(seen) == [(1, 72), (1, 72), (2, 50), (2, 50)]
    assert_rows_close(batch, ours, expected)


@pytest.mark.parametrize(
    ("implementation", "reason"),
    [("sdpa", HOLES), ("eager", HOLES), ("eager", "output_attentions")],
)
@pytest.mark.parametrize("side", SIDES)
def test_batches_that_are_dense_and_said(
    build, make_batch, sparse_layers, implementation, side, reason
):
    model, batch = build("llama", implementation), make_batch(side)
    if reason == HOLES:
        batch.mask[3, batch.spans[3].start + 4] = 0
    run = partial(model, **batch.arguments, output_attentions=reason != HOLES)
    stock = run().logits
    with enable(model, **H2O), pytest.warns(UserWarning, match=reason) as caught:
        ours = run().logits
        run()
    assert_close(ours[batch.mask.bool()], stock[batch.mask.bool()])
    assert sparse_layers == [] and len(caught) == 1
    with enable(model, strict=True, **H2O), pytest.raises(NotImplementedError, match=reason):
        run()


MASKS = {
    "whole": ("1111", (0, 4)),
    "left": ("0011", (2, 4)),
    "right": ("1000", (0, 1)),
    "both": ("0110", (1, 3)),
    "nothing": ("0000", (0, 0)),
    "a hole": ("1011", None),
    "a shorter mask": ("11", (0, 2)),
    "a longer mask": ("00111", (2, 4)),
    "a hole after the keys": ("11110", (0, 4)),
}


@pytest.mark.parametrize("name", list(MASKS))
def test_spans(name):
    text, span = MASKS[name]
    mask = torch.tensor([[letter == "1" for letter in text]] * 2)
    assert row_spans(mask, 4) == (None if span is None else (span, span))
    mask[1] = True
    if span is not None:
        assert row_spans(mask, 4)[0] == span


@pytest.mark.filterwarnings("ignore::FutureWarning")  # a new name in some version
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_stock(llama, make_batch, sparse_layers, checkpointing):
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
            ours = gradient()
    assert_close(ours, stock)
    assert sparse_layers == []


def test_a_frozen_model_outside_of_no_grad_is_dense(llama, make_batch, sparse_layers):
    batch = make_batch("left")
    llama.requires_grad_(False)
    stock = llama(**batch.arguments).logits
    with torch.enable_grad(), enable(llama, **H2O):
        with pytest.warns(UserWarning, match=r"padding while gradients are on.*no_grad"):
            ours = llama(**batch.arguments).logits
        assert sparse_layers == []
    assert_rows_close(batch, ours, batch.cut(stock))


@pytest.mark.parametrize(
    ("name", "own_cache"), [*((x, False) for x in MODELS), ("llama", True), ("gemma3", True)]
)
def test_generate_gives_what_each_row_gives_alone(
    build, make_batch, sparse_layers, name, own_cache
):
    model, batch = build(name), make_batch("left")

    def generate(**arguments):
        found = model.generate(
            **arguments, **GREEDY, return_dict_in_generate=True, output_logits=True
        )
        tokens = found.sequences[:, arguments["input_ids"].shape[1] :]
        return tokens, torch.stack(found.logits, dim=1)

    padded = {"input_ids": batch.ids, "attention_mask": batch.mask}
    _, stock = generate(**padded)
    with enable(model, strict=True, **RECOMMENDED):
        alone = [generate(input_ids=row) for row in batch.rows]
        sparse_layers.clear()
        cache = {"past_key_values": new_cache(model)} if own_cache else {}
        ours, logits = generate(**padded, **cache)
    assert torch.equal(ours, torch.cat([tokens for tokens, _ in alone]))
    assert_close(logits, torch.cat([x for _, x in alone]), 1e-4)
    assert (logits - stock).abs().amax() > 1e-2
    assert set(sparse_layers) == {72, 40, 55}


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_last_rows_of_a_call_verify_candidates(llama, make_batch, sparse_layers, side):
    """With a cache and the logits of 6 tokens, the last 5 places of a call are candidates."""
    kept, batch = 6, make_batch(side, (72, 70, 68, 40))
    length = batch.ids.shape[1]
    with enable(llama, strict=True, **RECOMMENDED):
        cache = new_cache(llama)
        ours = llama(**batch.arguments, past_key_values=cache, logits_to_keep=kept).logits
        together = sorted(sparse_layers)
        sparse_layers.clear()
        for index, (row, span) in enumerate(zip(batch.rows, batch.spans, strict=True)):
            here = max(0, kept - (length - span.stop))  # kept places of this row
            if here == 0:
                llama(row)
                continue
            cache = new_cache(llama)
            alone = llama(row, past_key_values=cache, logits_to_keep=here).logits[0]
            assert_close(ours[index, :here], alone)
    assert together == sorted(sparse_layers)
    assert together == sorted([67, 65, 63, 35] * 2 if side == "left" else [67, 67, 67, 40] * 2)


def test_a_right_padded_batch_without_its_mask(llama, make_batch, sparse_layers):
    """The loop of lm-eval passes no mask: pads on the right are seen by nobody."""
    batch = make_batch("right", (72, 40, 55))
    with enable(llama, strict=True, **RECOMMENDED):
        expected = [llama(row).logits[0] for row in batch.rows]
        ours = llama(batch.ids).logits
    assert_rows_close(batch, ours, expected, 1e-4)
    assert sparse_layers


@pytest.mark.parametrize("new", [1, 7, 40])
@pytest.mark.parametrize(
    ("implementation", "own_cache", "masked"),
    [("sdpa", True, True), ("sdpa", False, False), ("eager", False, True)],
)
def test_later_calls_are_dense_over_the_cache(
    build, make_batch, make_ids, sparse_layers, implementation, own_cache, masked, new
):
    model, batch = build("llama", implementation), make_batch("left" if masked else "right")
    more = make_ids(4, new, seed=9)
    mask = torch.cat([batch.mask, torch.ones_like(more)], dim=1)
    positions = batch.positions[:, -1:] + 1 + torch.arange(new)
    arguments = {"attention_mask": mask, "position_ids": positions} if masked else {}
    with enable(model, **RECOMMENDED):
        kind = ChunkedPrefillCache if own_cache else transformers.DynamicCache
        cache = model(**batch.arguments, past_key_values=kind(config=model.config)).past_key_values
        assert all(layer.padded and layer.state is None for layer in cache.layers)
        plain, later = stock_copy(cache, model.config), copy.deepcopy(cache)
        with pytest.warns(UserWarning, match=CONTINUES) if new == 40 else nullcontext():
            ours = model(more, past_key_values=cache, **arguments).logits
    stock = model(more, past_key_values=plain, **arguments).logits
    assert_close(ours, stock)
    with enable(model, strict=True, **RECOMMENDED):
        refused = pytest.raises(NotImplementedError, match=CONTINUES)
        with refused if new == 40 else nullcontext():
            model(more, past_key_values=later, **arguments)
    assert len(sparse_layers) == 6


def test_padding_after_an_unpadded_prefix_is_dense(llama, make_batch, make_ids, sparse_layers):
    prefix, batch = make_ids(4, 32, seed=9), make_batch("right")
    mask = torch.cat([torch.ones_like(prefix), batch.mask], dim=1)
    stock = llama(torch.cat([prefix, batch.ids], dim=1), attention_mask=mask).logits[:, 32:]
    with enable(llama, **EXACT):
        cache = new_cache(llama)
        llama(prefix, past_key_values=cache)
        with pytest.warns(UserWarning, match=CONTINUES):
            ours = llama(batch.ids, attention_mask=mask, past_key_values=cache).logits
    assert sparse_layers == [32, 32]
    assert_rows_close(batch, ours, batch.cut(stock))


@pytest.mark.parametrize("how", ["reset", "crop", "a failed forward"])
def test_an_emptied_cache_begins_anew(llama, make_batch, make_ids, how):
    batch, ids = make_batch("left"), make_ids(4, 72)
    with enable(llama, strict=True, **RECOMMENDED):
        cache, other = new_cache(llama), new_cache(llama)
        with failing(llama.model.norm) if how == "a failed forward" else nullcontext():
            llama(**batch.arguments, past_key_values=cache)
        if how == "reset":
            cache.reset()
        elif how == "crop":
            cache.crop(-batch.ids.shape[1])
        assert cache.get_seq_length() == 0 and not any(layer.padded for layer in cache.layers)
        ours, expected = (in_calls(llama, each, ids, (32, 40)) for each in (cache, other))
        assert torch.equal(ours, expected)
    assert cache.layers[0].state.length == 72
