"""Modes of transformers and of this library in it, with the methods of `common.peers`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface

import h2o_prefill
from common.machine import keep_freed_memory
from common.variants import decoder, prefill
from h2o_prefill.eval.forward import PromptForward
from h2o_prefill.eval.scores import token_nll
from h2o_prefill.generation import load_model

Ids = list[int]

# OpenVINO's Tri-shape by FlexAttention: sinks, recent keys, and last queries that see everything.
_TRI_SHAPE = "tri-shape"
_SINKS, _RECENT, _LAST = 128, 1920, 100


class Transformers:
    """A model of transformers: as it is, enabled, compiled, or with FlexAttention."""

    # Decodes in place of what the last call decoded.
    decode: Callable[[], object]

    def __init__(
        self,
        model: str,
        threads: int,
        dtype: str,
        settings: str = "",
        attention: str = "",
        backend: str = "",
    ) -> None:
        """Load a model, and enable it if there are settings.

        Or take `attention`, "tri-shape"; or let `backend`, a module that has one of its name for
        `torch.compile`, compile it.
        """
        torch.set_num_threads(threads)
        keep_freed_memory()
        self._model, tokenizer = load_model(model, dtype)
        if settings:
            h2o_prefill.enable(self._model, settings, tokenizer=tokenizer)
        if attention == _TRI_SHAPE:
            _register_tri_shape()
            self._model.set_attn_implementation(_TRI_SHAPE)
        if backend:
            importlib.import_module(backend)
            self._model.compile(backend=backend, dynamic=True)

    @torch.inference_mode()
    def prefill(self, prompt: Ids) -> None:
        """Compute the first token after a prompt."""
        prefill(self._model, [torch.tensor([prompt])])

    @torch.inference_mode()
    def nll(self, prompts: Sequence[Ids], begin: int, end: int) -> np.ndarray:
        """Score the prompts' own tokens."""
        forward, rows = PromptForward(self._model), range(begin, end)
        ids = torch.tensor(prompts)
        scores = [token_nll(forward(each[None])[0], each, rows) for each in ids]
        return torch.stack(scores).numpy()

    def start(self, prompt: Ids, steps: int) -> None:
        """Prefill the prompt after which so many tokens are decoded."""
        self.decode = decoder(self._model, torch.tensor([prompt]), steps)


def _register_tri_shape() -> None:
    """Make Tri-shape an attention of transformers, for whole prompts."""
    flex = torch.compile(flex_attention, dynamic=False)
    masks: dict[int, Any] = {}

    def visible(length: int, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        kept = (row - column < _RECENT) | (column < _SINKS) | (row >= length - _LAST)
        return kept & (row >= column)

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any
    ) -> tuple[Tensor, None]:
        length = query.shape[-2]
        if length not in masks:
            shape = (None, None, length, length)
            masks[length] = create_block_mask(partial(visible, length), *shape, device="cpu")
        blocks, scale = masks[length], options.get("scaling")
        found = flex(query, key, value, block_mask=blocks, scale=scale, enable_gqa=True)
        return found.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_TRI_SHAPE, attend)
    AttentionMaskInterface.register(_TRI_SHAPE, lambda *args, **kwargs: None)
