"""One timed forward pass of a prompt, whose logits are computed later, slice by slice."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill.vocabulary import check_ids

_PROBE_TOKENS = 8


class PromptLogits:
    """Logits made on demand from rows [T, C] by an output layer; without one, the rows."""

    def __init__(self, rows: Tensor, head: Callable[[Tensor], Tensor] | None) -> None:
        self.rows = rows
        self.head = head

    def slice(self, begin: int, end: int) -> Tensor:
        """Return the fp32 logits of rows begin .. end - 1, [end - begin, vocabulary]."""
        rows = self.rows[begin:end]
        return (rows if self.head is None else self.head(rows)).float()


class PromptForward:
    """Runs a causal language model over one prompt.

    Full logits are large (4096 x 49152 in fp32: 805 MB). If the model is a base model followed by a
    plain output layer, `head`, the call computes the logits of the last token only, as a prefill
    does, and keeps the hidden states. If a probe shows that the output layer alone does not give
    the model's logits (softcap, scaling), `head` is None and the full logits are kept.
    """

    def __init__(self, model: nn.Module) -> None:
        from h2o_prefill.hf.cache import last_logits_only

        self._model, self._last_only = model, last_logits_only(model)
        self._base: Any = getattr(model, "base_model", None)
        get: Any = getattr(model, "get_output_embeddings", None)
        layer = get() if callable(get) else None
        plain = isinstance(layer, nn.Module) and isinstance(self._base, nn.Module)
        keeps_rows = plain and self._base is not model and self._last_only
        self.head: Any = layer if keeps_rows and self._gives_logits(layer) else None

    def __call__(self, input_ids: Tensor) -> tuple[PromptLogits, float]:
        """Run a prompt, int64 [1, T]; return its logits and the seconds of the call."""
        if self.head is None:
            output, seconds = self._timed(input_ids)
            return PromptLogits(_logits(output)[0], None), seconds
        hidden, _, seconds = self._hidden_states(input_ids, logits_to_keep=1)
        return PromptLogits(hidden, self.head), seconds

    def prefill(self, input_ids: Tensor) -> float:
        """Return the seconds of a call that computes the logits of the last token only."""
        return self._timed(input_ids, **self._last_only)[1]

    def _timed(self, input_ids: Tensor, **options: Any) -> tuple[Any, float]:
        check_ids(input_ids, self._model)
        _synchronize(input_ids.device)
        start = time.perf_counter()
        output = self._model(input_ids=input_ids, **options)
        _synchronize(input_ids.device)
        return output, time.perf_counter() - start

    def _hidden_states(self, input_ids: Tensor, **options: Any) -> tuple[Tensor, Any, float]:
        hidden: list[Tensor] = []
        # A hook, not a call of the base model: hooks on the whole model must run.
        handle = self._base.register_forward_hook(
            lambda module, args, output: hidden.append(output.last_hidden_state)
        )
        try:
            output, seconds = self._timed(input_ids, **options)
        finally:
            handle.remove()
        return hidden[-1][0], output, seconds

    def _gives_logits(self, layer: Any) -> bool:
        parameter = next(self._model.parameters())
        ids = torch.arange(_PROBE_TOKENS, device=parameter.device).unsqueeze(0)
        try:
            hidden, output, _ = self._hidden_states(ids)
        except (AttributeError, IndexError):  # a base model that returns something else
            return False
        # Same call, same shapes: equal to the bit unless the model does more with its output layer.
        return torch.equal(layer(hidden.unsqueeze(0)), _logits(output))


def _logits(output: Any) -> Tensor:
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if logits is None:
        raise ValueError(f"model must have a head that returns logits, got {type(output).__name__}")
    return logits


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
