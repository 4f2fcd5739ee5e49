"""Strict causality through a whole model: no logit depends on a later token."""

import dataclasses

import pytest
import torch
from hf_helpers import LETTERS, assert_close, in_calls, new_cache
from hf_helpers import SPARSE as SIZES

from h2o_prefill import PrefillConfig, enable, ops
from h2o_prefill.presets import preset_config

BASE = PrefillConfig(**SIZES)
RECALL = BASE.replace(recall=2, recall_block=8)
OPTIONS = {
    "h2o": preset_config("h2o", **SIZES),
    "sinks": BASE.replace(sink_tokens=2),
    "dense tail": BASE.replace(dense_tail=10),
    "dense layers": BASE.replace(dense_layers=(0,)),
    "wide layers": BASE.replace(wide=((1, 2),)),
    "wide heads": BASE.replace(wide=((1, 0, 2),)),
    "widening": BASE.replace(error_rows=2, error_threshold=0.1, max_widen=2),
    "widening of wide heads": preset_config(
        "recommended", **SIZES, recall_block=8, error_rows=4, wide=((1, 1, 2),)
    ),
    "max over the group": BASE.replace(gqa_reduce="max"),
    "no heavy hitters": BASE.replace(heavy_budget=0),
    "no local window": BASE.replace(local_window=0),
    "chunks alone": BASE.replace(local_window=0, heavy_budget=0, block_diagonal=True),
    "recall": RECALL,
    "recall in one block a chunk": RECALL.replace(recall=8, recall_block=16, recall_max_count=64),
    "recall in small blocks": RECALL.replace(recall=4, recall_block=4),
    "recall in blocks of one row": RECALL.replace(recall_block=1),
    "recall by long suffixes": RECALL.replace(recall_suffix=6),
    "recall by single tokens": RECALL.replace(recall=3, recall_suffix=1),
    "recall of single keys": RECALL.replace(recall_span=1),
    "recall of long spans": RECALL.replace(recall_span=5),
    "recall of rare single tokens": RECALL.replace(recall=3, recall_max_count=4),
    "recall by characters": RECALL.replace(recall_characters=3),
    "recall and everything else": RECALL.replace(
        sink_tokens=2, dense_tail=10, dense_layers=(1,), gqa_reduce="max", min_prefill=3
    ),
    "recommended": preset_config("recommended", **SIZES),
}
# New tokens of each call of the prompt. After a call that ends inside a chunk, and one that is too
# short to be sparse, chunks and blocks begin at odd places.
CALLS = {"one": [72], "two": [32, 40], "three": [24, 5, 43]}
EVERY_CALL = [*(("llama", calls) for calls in CALLS), ("gemma3", "one")]
# Around the borders of chunks and blocks of rows, whichever of these calls they belong to.
BORDERS = (*range(8, 72, 8), *range(29, 69, 8))
TOKENS = sorted({1, 4, 69, 71} | {border + side for border in BORDERS for side in (-1, 0, 3)})


@pytest.fixture
def prompt(make_ids):
    """Return a prompt of nine different tokens, so that recall finds places all the time."""
    return make_ids(1, 72) % 9 + 3


def leaking_tokens(model, ids, calls):
    """Return the tokens whose change moves a logit before them, if only in its last bit."""

    def logits_of(ids):
        if len(calls) == 1:
            return model(ids, use_cache=False).logits
        return in_calls(model, new_cache(model), ids, calls)

    before, leaking = logits_of(ids), []
    for token in TOKENS:
        changed = ids.clone()
        changed[0, token] = 3 + (ids[0, token] - 3 + 4) % 9
        after = logits_of(changed)
        assert (after[:, token] - before[:, token]).abs().amax() > 1e-3
        if not torch.equal(after[:, :token], before[:, :token]):
            leaking.append(token)
    return leaking


ALL = [(option, *call) for option in OPTIONS for call in EVERY_CALL]
# Every option in calls of one kind; of the kinds the next for the next option.
SAMPLED = [(x, *EVERY_CALL[i % len(EVERY_CALL)]) for i, x in enumerate(OPTIONS)]


@pytest.mark.parametrize(
    ("option", "name", "calls"),
    [*SAMPLED, *(pytest.param(*x, marks=pytest.mark.slow) for x in ALL if x not in SAMPLED)],
)
def test_changing_a_token_changes_no_logit_before_it(build, prompt, option, name, calls):
    model = build(name)
    with enable(model, OPTIONS[option], tokenizer=LETTERS):
        assert leaking_tokens(model, prompt, CALLS[calls]) == []


@pytest.mark.parametrize("option", ["recall", "recall in blocks of one row", "recommended"])
def test_a_block_that_sees_what_its_later_rows_recall_is_caught(llama, prompt, option, monkeypatch):
    find, block = ops.lexical_recall, OPTIONS[option].recall_block

    def all_from_the_first_row(ids, begin, settings, *text):
        offsets, positions, _ = find(ids, begin, settings, *text)
        owner = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff())
        return offsets, positions, (begin + owner * block).int()

    monkeypatch.setattr(ops, "lexical_recall", all_from_the_first_row)
    with enable(llama, OPTIONS[option], tokenizer=LETTERS):
        leaking = leaking_tokens(llama, prompt, CALLS["one"])
    # The first row of a block has no row before it in its block, whatever the block sees.
    assert all(token % block for token in leaking)
    assert (leaking == []) == (block == 1)


# Settings that are the same in all options.
ONE_VALUE = ("chunk_size", "exact")


def test_every_setting_is_among_the_options():
    for field in dataclasses.fields(PrefillConfig):
        values = {getattr(option, field.name) for option in OPTIONS.values()}
        assert len(values) > 1 or field.name in ONE_VALUE, field.name


@pytest.mark.parametrize("option", list(OPTIONS))
def test_every_option_changes_what_it_is_for(llama, prompt, option):
    stock = llama(prompt).logits
    with enable(llama, BASE):
        base = llama(prompt).logits
    with enable(llama, OPTIONS[option], tokenizer=LETTERS):
        ours = llama(prompt).logits
    assert ours.isfinite().all() and not torch.allclose(ours[:, 16:], stock[:, 16:], atol=1e-3)
    assert torch.equal(ours, base) == (option == "h2o")
    assert_close(ours[:, :16], stock[:, :16])
