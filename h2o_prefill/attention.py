"""Prefill attention as a module that holds settings; state is passed in and returned."""

import warnings
from typing import Optional, Union

import torch
from torch import Tensor, nn

from h2o_prefill._warn import warn
from h2o_prefill.config import PrefillConfig
from h2o_prefill.presets import chosen_config


def _is_compiling() -> bool:
    # is_scripting() is a constant in TorchScript, which drops the other branch.
    if torch.jit.is_scripting():
        return False
    else:
        return torch.compiler.is_compiling()


def _lists_of(
    recall: Optional[tuple[Tensor, Tensor, Tensor]],
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    if recall is None:
        return None, None, None
    return recall[0], recall[1], recall[2]


class ChunkedSparseAttention(nn.Module):
    """Chunked sparse prefill attention, one layer and one call at a time.

    The module holds settings and no state: the state of a prompt is passed in and returned as
    tensors, so the module can be scripted, copied, and shared by prompts and layers. Calls are
    sparse or dense as the settings say.

    Parameters
    ----------
    config : PrefillConfig or str, optional
        Settings, or a text for `PrefillConfig.parse`. Default: the preset "recommended".
    token_text : Tensor, optional
        What `h2o_prefill.vocabulary.token_text` returned for the model's tokenizer, for
        `recall_characters`.

    Example
    -------
    >>> attention = ChunkedSparseAttention("recommended")
    >>> out, scores, memory, errors = attention(q, k, v, token_ids=token_ids)
    """

    settings: str
    recalls: bool
    token_text: Optional[Tensor]

    def __init__(
        self,
        config: Optional[Union[PrefillConfig, str]] = None,
        token_text: Optional[Tensor] = None,
    ) -> None:
        super().__init__()
        chosen = chosen_config(config)
        self.settings = chosen.to_string()
        self.recalls = chosen.recall > 0
        self.token_text = token_text
        self._warned = False

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Optional[Tensor] = None,
        memory: Optional[Tensor] = None,
        last_chunk_begin: int = 0,
        scale: Optional[float] = None,
        token_ids: Optional[Tensor] = None,
        recall: Optional[tuple[Tensor, Tensor, Tensor]] = None,
        layer: int = 0,
        sinks: Optional[Tensor] = None,
        softcap: float = 0.0,
        errors: Optional[Tensor] = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Attend with the queries of one call.

        Parameters
        ----------
        q : Tensor
            [B, Hq, Tq, D], after RoPE.
        k, v : Tensor
            [B, Hkv, T_total, D] and [B, Hkv, T_total, Dv], the whole history, which ends with the
            call's tokens.
        scores, memory, errors, last_chunk_begin
            State that the previous call of the prompt returned, and the value of
            `last_chunk_begin()` for it; omit them in the first call.
        scale, sinks, softcap
            As `ops.prefill_attention` takes them.
        token_ids : Tensor, optional
            int64 [B, T_total], of the whole history, to search for recalled keys. With several
            layers, call `find_recalled` once and pass `recall`.
        recall : tuple of Tensor, optional
            What `find_recalled` returned for the call.
        layer : int
            Index of the layer, for the settings that name layers.

        Returns
        -------
        tuple of Tensor
            Output [B, Hq, Tq, Dv], and the state: scores [B, Hkv, T_total], memory set int32
            [B, Hkv, M], errors float32 [B, Hkv, 4].
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
            errors,
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
        scale: Optional[float] = None,
        recall: Optional[tuple[Tensor, Tensor, Tensor]] = None,
        layer: int = 0,
        sinks: Optional[Tensor] = None,
        softcap: float = 0.0,
        errors: Optional[Tensor] = None,
        window: Optional[int] = None,
    ) -> Tensor:
        """Call `ops.prefill_attention_`: attention in buffers that are allocated once.

        `advance_` moves the position past the call when all layers have attended.
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
            errors,
            window,
        )

    @torch.jit.export
    def advance_(self, position: Tensor, num_tokens: int) -> None:
        """Move a position of `attend_` past a call of `num_tokens` tokens."""
        torch.ops.h2o_prefill.advance_position_(position, num_tokens, self.settings)

    @torch.jit.export
    def find_recalled(self, token_ids: Tensor, begin: int) -> tuple[Tensor, Tensor, Tensor]:
        """Search a prompt, int64 [B, T_total], for the keys that tokens from `begin` on recall.

        Returns the `recall` argument for all layers.
        """
        return torch.ops.h2o_prefill.lexical_recall(
            token_ids, begin, self.settings, self.token_text
        )

    @torch.jit.export
    def last_chunk_begin(self, past: int, new: int, last_chunk_begin: int = 0) -> int:
        """Return `last_chunk_begin` for the next call, after one of `new` tokens after `past`.

        The argument is the value before the call; a dense call does not change it.
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
