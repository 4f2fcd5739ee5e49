"""Prefill attention as a module that holds settings, over the state of a layer."""

# `LayerState` is a class of C++, which mypy does not know.
# mypy: disable-error-code="valid-type, attr-defined, no-any-return"

import warnings
from typing import Optional, Union

import torch
from torch import Tensor, nn

from h2o_prefill._warn import warn
from h2o_prefill.config import PrefillConfig
from h2o_prefill.presets import chosen_config
from h2o_prefill.state import LayerState


class ChunkedSparseAttention(nn.Module):
    """Chunked sparse prefill attention, one layer and one call at a time.

    The module holds settings and no state, so it can be scripted, copied, and shared by prompts and
    layers. Calls are sparse or dense as the settings say. In graphs of torch.compile and
    torch.export, call `ops.prefill_attention_`.

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
    >>> state = torch.classes.h2o_prefill.LayerState()
    >>> out = attention(q, k, v, state, token_ids=token_ids)
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
        state: Optional[LayerState] = None,
        token_ids: Optional[Tensor] = None,
        recall: Optional[tuple[Tensor, Tensor, Tensor]] = None,
        layer: int = 0,
        scale: Optional[float] = None,
        sinks: Optional[Tensor] = None,
        softcap: float = 0.0,
        window: Optional[int] = None,
    ) -> Tensor:
        """Attend with the queries of one call. Returns [B, Hq, T, Dv].

        Parameters
        ----------
        q : Tensor
            [B, Hq, T, D], after RoPE.
        k, v : Tensor
            [B, Hkv, T_total, D] and [B, Hkv, T_total, Dv], the whole history, which ends with the
            call's tokens.
        state : torch.classes.h2o_prefill.LayerState, optional
            What the layer knows of the prompt, which the call updates. None: the prompt is one
            call.
        token_ids : Tensor, optional
            int64 [B, T_total], of the whole history, to search for recalled keys. With several
            layers, call `find_recalled` once and pass `recall`.
        recall : tuple of Tensor, optional
            What `find_recalled` returned for the call.
        layer : int
            Index of the layer, for the settings that name layers.
        scale, sinks, softcap, window
            As `ops.prefill_attention_` takes them.
        """
        if state is None:
            state = LayerState()
        past = k.shape[2] - q.shape[2]
        if recall is None and token_ids is not None and self.recalls:
            recall = self.find_recalled(token_ids, past)
        offsets: Optional[Tensor] = None
        positions: Optional[Tensor] = None
        visible_from: Optional[Tensor] = None
        if recall is not None:
            offsets, positions, visible_from = recall
        elif self.recalls and not self._warned:
            self._warn_of_no_recall(layer, past, q.shape[2])
        return state.attend_history(
            q,
            k,
            v,
            layer,
            self.settings,
            scale,
            sinks,
            softcap,
            offsets,
            positions,
            visible_from,
            window,
        )

    @torch.jit.export
    def find_recalled(self, token_ids: Tensor, begin: int) -> tuple[Tensor, Tensor, Tensor]:
        """Search a prompt, int64 [B, T_total], for the keys that tokens from `begin` on recall.

        Returns the `recall` argument for all layers.
        """
        return torch.ops.h2o_prefill.lexical_recall(
            token_ids, begin, self.settings, self.token_text
        )

    def _warn_of_no_recall(self, layer: int, past: int, new: int) -> None:
        if not torch.ops.h2o_prefill.is_sparse(self.settings, layer, past, new):
            return
        self._warned = True
        message = (
            "h2o_prefill: recall is off: a sparse call without token ids and without recall lists"
        )
        if torch.jit.is_scripting():
            warnings.warn(message)  # noqa: B028 (TorchScript takes no more)
        else:
            warn(message)
