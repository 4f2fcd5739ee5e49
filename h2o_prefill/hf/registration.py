"""Makes the attention function and the mask function known to transformers."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface

from h2o_prefill.hf.attention_function import h2o_prefill_attention
from h2o_prefill.hf.mask_function import h2o_prefill_mask
from h2o_prefill.hf.names import NAME


def register() -> str:
    """Register the attention function and the mask function with transformers.

    `enable` does this. Call it yourself to load a model with `attn_implementation="h2o_prefill"`:
    it is dense until `enable` switches it on.
    """
    AttentionInterface.register(NAME, h2o_prefill_attention)
    # Without a mask function of this name every layer would get no mask at all, padded rows
    # included.
    AttentionMaskInterface.register(NAME, h2o_prefill_mask)
    return NAME
