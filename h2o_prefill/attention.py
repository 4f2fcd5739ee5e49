"""Prefill attention as a module: settings inside, state handed in and out."""

import warnings
from typing import Optional, Union

import torch
from torch import Tensor, nn

from h2o_prefill._warn import warn
from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import recall_settings
from h2o_prefill.presets import chosen_config


def _is_compiling() -> bool:
    # TorchScript knows is_scripting() as a constant, and leaves out the other branch.
    if torch.jit.is_scripting():
        return False
    else:
        return torch.compiler.is_compiling()


def _lists_of(
    recall: Optional[tuple[Tensor, Tensor, Tensor]],  # noqa: UP045
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:  # noqa: UP045
    """Return recall lists as the operators take them: all or none."""
    if recall is None:
        return None, None, None
    return recall[0], recall[1], recall[2]


class ChunkedSparseAttention(nn.Module):
    """Attend under chunked sparse prefill, one layer and one call at a time.

    The module holds settings and no state: what a prompt leaves behind goes in and out as tensors,
    so that it can be scripted, copied, and shared by prompts and layers. Calls are sparse or dense
    as the settings say.

    Parameters
    ----------
    config : PrefillConfig or str, optional
        Settings, or a text that `PrefillConfig.parse` reads. Default: the preset "recommended".

    Example
    -------
    >>> attention = ChunkedSparseAttention("recommended")
    >>> out, scores, memory = attention(q, k, v, token_ids=token_ids)
    """

    settings: str
    recalls: bool
    recall_settings: list[int]

    # TorchScript reads annotations: it knows Optional and Union, not `|`.
    def __init__(
        self,
        config: Optional[Union[PrefillConfig, str]] = None,  # noqa: UP007, UP045
    ) -> None:
        super().__init__()
        chosen = chosen_config(config)
        self.settings = chosen.to_string()
        self.recalls = chosen.recall > 0
        self.recall_settings = list(recall_settings(chosen))
        self._warned = False

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Optional[Tensor] = None,  # noqa: UP045
        memory: Optional[Tensor] = None,  # noqa: UP045
        last_chunk_begin: int = 0,
        scale: Optional[float] = None,  # noqa: UP045
        token_ids: Optional[Tensor] = None,  # noqa: UP045
        recall: Optional[tuple[Tensor, Tensor, Tensor]] = None,  # noqa: UP045
        layer: int = 0,
        sinks: Optional[Tensor] = None,  # noqa: UP045
        softcap: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend with the queries of one call.

        Parameters
        ----------
        q : Tensor
            [B, Hq, Tq, D], after RoPE.
        k, v : Tensor
            [B, Hkv, T_total, D] and [B, Hkv, T_total, Dv], the whole history with the call's
            tokens.
        scores, memory, last_chunk_begin
            Scores and memory set that the previous call of the prompt returned, and the value of
            `last_chunk_begin()` for it; leave them out in the first call.
        scale : float, optional
            Softmax scale, default D^-0.5.
        token_ids : Tensor, optional
            int64 [B, T_total], of the whole history. Needed for recall; `find_recalled` searches
            them once for all layers.
        recall : tuple of Tensor, optional
            What `find_recalled` returned for the call.
        layer : int
            The number of the layer, for `dense_layers` and `wide_layers`.
        sinks : Tensor, optional
            [Hq], attention sinks: one extra logit in the softmax of each query head, without a
            value.
        softcap : float
            Logits z are capped to softcap * tanh(z / softcap); 0: no cap.

        Returns
        -------
        tuple of Tensor
            Output [B, Hq, Tq, Dv], scores [B, Hkv, T_total], memory int32 [B, Hkv, K + L + H].
        """
        if recall is None and token_ids is not None and self.recalls:
            recall = self.find_recalled(token_ids, k.shape[2] - q.shape[2])
        offsets, positions, visible_from = _lists_of(recall)
        if offsets is None and self.recalls and not _is_compiling():
            self._warn_of_no_recall(layer, k.shape[2] - q.shape[2], q.shape[2])
        return torch.ops.h2o_prefill.prefill_attention(
            q,
            k,
            v,
            scores,
            memory,
            offsets,
            positions,
            visible_from,
            last_chunk_begin,
            layer,
            self.settings,
            scale,
            sinks,
            softcap,
        )

    @torch.jit.export
    def attend_(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache_key: Tensor,
        cache_value: Tensor,
        scores: Tensor,
        memory: Tensor,
        position: Tensor,
        scale: Optional[float] = None,  # noqa: UP045
        recall: Optional[tuple[Tensor, Tensor, Tensor]] = None,  # noqa: UP045
        layer: int = 0,
        sinks: Optional[Tensor] = None,  # noqa: UP045
        softcap: float = 0.0,
    ) -> Tensor:
        """Attend with the queries of one call in buffers that are allocated once.

        Parameters and result are those of `ops.prefill_attention_`; `advance_` moves the position
        behind the call when all layers have attended.
        """
        offsets, positions, visible_from = _lists_of(recall)
        if offsets is None and self.recalls and not _is_compiling():
            self._warn_of_no_recall(layer, int(position[0]), q.shape[2])
        return torch.ops.h2o_prefill.prefill_attention_(
            q,
            k,
            v,
            cache_key,
            cache_value,
            scores,
            memory,
            position,
            offsets,
            positions,
            visible_from,
            layer,
            self.settings,
            scale,
            sinks,
            softcap,
        )

    @torch.jit.export
    def advance_(self, position: Tensor, num_tokens: int) -> None:
        """Move a position of `attend_` behind a call of so many tokens."""
        torch.ops.h2o_prefill.advance_position_(position, num_tokens, self.settings)

    @torch.jit.export
    def find_recalled(self, token_ids: Tensor, begin: int) -> tuple[Tensor, Tensor, Tensor]:
        """Search a prompt for the keys that the tokens from `begin` on recall.

        Parameters
        ----------
        token_ids : Tensor
            int64 [B, T_total] on the CPU.
        begin : int
            Where the call begins.

        Returns
        -------
        tuple of Tensor
            For the `recall` of every layer.
        """
        chunk_size, block, places, suffix, span, max_count = self.recall_settings
        return torch.ops.h2o_prefill.lexical_recall(
            token_ids, begin, chunk_size, block, places, suffix, span, max_count
        )

    @torch.jit.export
    def last_chunk_begin(self, past: int, new: int, last_chunk_begin: int = 0) -> int:
        """Return the `last_chunk_begin` for the call after one of `new` tokens behind `past`.

        Parameters
        ----------
        past, new : int
            Tokens before the call, and tokens of the call.
        last_chunk_begin : int
            That of the call itself, which a dense call does not change.
        """
        position = torch.tensor([past, last_chunk_begin])
        torch.ops.h2o_prefill.advance_position_(position, new, self.settings)
        return int(position[1])

    def _warn_of_no_recall(self, layer: int, past: int, new: int) -> None:
        sparse = torch.ops.h2o_prefill.is_sparse(self.settings, layer, past, new)
        if self._warned or not sparse:
            return
        self._warned = True
        message = (
            "h2o_prefill: recall is off: a sparse call without token ids and without recall lists"
        )
        if torch.jit.is_scripting():
            warnings.warn(message)  # noqa: B028 (TorchScript takes no more)
        else:
            warn(message)
