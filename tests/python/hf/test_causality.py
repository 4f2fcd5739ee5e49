"""Strict causality through a whole model: no logit depends on a later token."""

import dataclasses
import random
import warnings

import pytest
import torch
from hf_helpers import LETTERS, in_calls, new_cache
from hf_helpers import SPARSE as SIZES
from random_calls.draw import Draw, draw_settings

from h2o_prefill import PrefillConfig, enable
from h2o_prefill.presets import preset_config

RECALL = PrefillConfig(**SIZES, recall=2)
NAMED = {
    "recommended": preset_config("recommended", **SIZES),
    "blocks": RECALL.replace(chunk_size=24),  # of eight rows
    "rows": RECALL.replace(chunk_size=17),  # blocks of one row
}
# And settings of every kind: heads that are widened, dense tails, characters.
DRAWN = [draw_settings(Draw(random.Random(seed)), 40, layers=2) for seed in range(18)]
OPTIONS = {
    **NAMED,
    "exact": preset_config("exact", chunk_size=16),
    **{f"drawn {i}": config for i, config in enumerate(DRAWN)},
}
# New tokens of each call of the prompt. After a call that ends inside a chunk, and one that is too
# short to be sparse, chunks and blocks begin at odd places.
CALLS = {"one": [72], "two": [32, 40], "three": [24, 5, 43]}
EVERY_CALL = [*(("llama", calls) for calls in CALLS), ("gemma3", "one")]
# Around the borders of chunks and blocks of rows, whichever of these calls they belong to.
BORDERS = (*range(8, 72, 8), *range(29, 69, 8))
TOKENS = sorted({1, 4, 69, 71} | {border + side for border in BORDERS for side in (-1, 0, 3)})


# The next kind of calls for the next option.
SAMPLED = [(x, *EVERY_CALL[i % len(EVERY_CALL)]) for i, x in enumerate(OPTIONS)]


@pytest.mark.parametrize(("option", "name", "calls"), SAMPLED)
def test_changing_a_token_changes_no_logit_before_it(build, make_ids, option, name, calls):
    """Not even in its last bit."""
    # Nine different tokens, so that recall finds places all the time.
    model, ids = build(name), make_ids(1, 72) % 9 + 3
    warnings.filterwarnings("ignore", message="h2o_prefill: ")  # some are dense

    def logits_of(ids):
        if calls == "one":
            return model(ids, use_cache=False).logits
        return in_calls(model, new_cache(model), ids, CALLS[calls])

    with enable(model, OPTIONS[option], tokenizer=LETTERS):
        before = logits_of(ids)
        for token in TOKENS:
            changed = ids.clone()
            changed[0, token] = 3 + (ids[0, token] - 3 + 4) % 9
            after = logits_of(changed)
            assert (after[:, token] - before[:, token]).abs().amax() > 1e-3
            assert torch.equal(after[:, :token], before[:, :token]), token


def test_every_setting_is_among_the_options():
    for field in dataclasses.fields(PrefillConfig):
        assert len({getattr(config, field.name) for config in OPTIONS.values()}) > 1, field.name
