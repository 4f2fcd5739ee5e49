"""The tokens of a window that need its long context: those of LongPPL (arXiv 2410.23771)."""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_prefill.eval.forward import PromptForward
from h2o_prefill.eval.perplexity.scoring import token_nll

# Tokens of the short context, at least; it is shared by as many scored tokens, so that it has
# fewer than twice as many.
SHORT_CONTEXT = 1024
# A key token gains more than the one from the long context, and costs less than the other with it,
# in nats: the paper's alpha and -beta.
_LEAST_GAIN = 2.0
_MOST_NLL = 2.0


def find_key_tokens(
    forward: PromptForward, input_ids: Tensor, dense_nll: Tensor, rows: range
) -> Tensor:
    """Return which rows predict a key token, bool [rows], on the CPU.

    log P(x | whole window) - log P(x | short context) > 2 and log P(x | whole window) > -2, both of
    the dense model. Takes the window, int64 [T], and the NLL of its rows, fp32 [rows].
    """
    short_nll = dense_nll.clone()
    # The first scored tokens have a short context anyway.
    for begin in range(SHORT_CONTEXT, len(input_ids) - SHORT_CONTEXT, SHORT_CONTEXT):
        piece = input_ids[begin : begin + 2 * SHORT_CONTEXT]
        scored = range(max(SHORT_CONTEXT - 1, rows.start - begin), len(piece) - 1)
        if scored:
            logits, _ = forward(piece.unsqueeze(0))
            first = begin + scored.start - rows.start
            short_nll[first : first + len(scored)] = token_nll(logits, piece, scored)
    return torch.logical_and(short_nll - dense_nll > _LEAST_GAIN, dense_nll < _MOST_NLL)
