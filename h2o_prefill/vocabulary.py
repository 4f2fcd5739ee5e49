"""Vocabularies: the ids that a model takes, and the text by which lexical recall finds more."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig

# Longer tokens are rules and blanks, not words.
_MOST_CHARACTERS = 32

_known: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()


def check_ids(token_ids: Tensor, model: Any) -> None:
    """Raise ValueError unless token ids, of any shape, are ints of a model's vocabulary."""
    config: Any = getattr(model, "config", None)
    vocabulary = config and getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if token_ids.is_floating_point() or token_ids.dtype == torch.bool:
        raise ValueError(f"input_ids must be ints, got {token_ids.dtype}")
    if vocabulary is not None and token_ids.numel() > 0:
        for wrong in (int(x) for x in token_ids.aminmax()):
            if not 0 <= wrong < vocabulary:
                rule = f"input_ids must be in [0, {vocabulary})"
                raise ValueError(f"{rule}, got {wrong} (of another tokenizer?)")


def check_tokenizer(tokenizer: Any) -> None:
    """Raise ValueError for what is neither a tokenizer of transformers nor None."""
    if tokenizer is not None and not hasattr(tokenizer, "batch_decode"):
        raise ValueError(f"tokenizer must be a tokenizer of transformers, got {tokenizer!r:.40}")


def text_for(tokenizer: Any, config: PrefillConfig) -> Tensor | None:
    """Return what recall with these settings needs of a tokenizer, None if that is nothing."""
    check_tokenizer(tokenizer)
    wanted = config.recall > 0 and config.recall_characters > 0 and tokenizer is not None
    return token_text(tokenizer) if wanted else None


def token_text(tokenizer: Any) -> Tensor:
    """Return the text of each token, by which `lexical_recall` compares characters.

    Letters and digits alone, without case: "The Whale," and "the  whale" are the same then.

    Parameters
    ----------
    tokenizer
        A tokenizer of transformers.

    Returns
    -------
    Tensor
        int32 [vocabulary, at most 32], code points, then 0.
    """
    if tokenizer not in _known:
        decoded = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        special = set(tokenizer.all_special_ids)
        texts = [
            [] if token in special else [ord(c) for c in text.casefold() if c.isalnum()]
            for token, text in enumerate(decoded)
        ]
        rows = [torch.tensor(text[-_MOST_CHARACTERS:], dtype=torch.int32) for text in texts]
        _known[tokenizer] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return _known[tokenizer]
