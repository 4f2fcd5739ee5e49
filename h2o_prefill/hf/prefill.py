"""Prefill a long prompt in several calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from h2o_prefill._library import build_info
from h2o_prefill.config import PrefillConfig
from h2o_prefill.fingerprint import digest
from h2o_prefill.functional import token_rows
from h2o_prefill.hf.cache import ChunkedPrefillCache, cache_argument, last_logits_only
from h2o_prefill.hf.enable import PrefillHandle, enable, handles_of
from h2o_prefill.hf.forward import announce
from h2o_prefill.hf.parallel import Stage, StageCache, layers_here, new_cache
from h2o_prefill.presets import chosen_config
from h2o_prefill.vocabulary import check_ids


def chunked_prefill(
    model: PreTrainedModel,
    input_ids: Any = None,
    config: PrefillConfig | str | None = None,
    *,
    attention_mask: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    chunks_per_call: int = 4,
    cache: ChunkedPrefillCache | None = None,
    tokenizer: Any = None,
    strict: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    **overrides: Any,
) -> Any:
    """Prefill a prompt sparsely, a few chunks at a time, so that activations stay small.

    The result equals one call over the whole prompt, except that `dense_tail` applies to the last
    call only, and that rotary embeddings of the kinds "dynamic" and "longrope" depend on the tokens
    of a call, beyond the length that the model was trained with.

    A model that transformers has loaded as stages (`DistributedConfig(pp_size=...)`) is prefilled
    by all of them at the same time, each on another chunk: call this in every process, with the
    same arguments. The result equals one process with `chunks_per_call=1`, to the bit.

    Parameters
    ----------
    model : PreTrainedModel
        A causal decoder. One that is not enabled is for the duration of this call; one that is
        keeps its settings.
    input_ids : Tensor, list or mapping
        int64 [B, T], the ids of one row or of rows of equal length as lists, or what a tokenizer
        returned, with its attention_mask.
    config, tokenizer, strict, **overrides
        As for `enable`, if the model is not enabled.
    attention_mask : Tensor, optional
        [B, T], or [B, T_total] with the tokens in the cache, without padding.
    inputs_embeds : Tensor, optional
        [B, T, hidden size], instead of input_ids; lexical recall is off then, with a warning.
    chunks_per_call : int
        Chunks that go through the model at once; of stages, those in a step of their schedule.
    cache : ChunkedPrefillCache, optional
        A cache to continue from. Default: a new one.
    on_progress : callable, optional
        Called after each step with the number of tokens that are prefilled, and of all.

    Returns
    -------
    ModelOutput
        What the model returned for the last call: `logits` of the last token, and the cache, from
        which `generate` continues, as `cache` (`past_key_values` before transformers 5.24).

    Raises
    ------
    ValueError
        If an argument is wrong, or for the reasons of `enable`; in every process, if an argument is
        not the same in all of them.
    DistributedPrefillError
        If another process is gone, or silent for longer than the timeout of its group. The cache
        must be reset then.
    """
    handle = next(iter(handles_of(model)), None)
    if handle is None:
        chosen = chosen_config(config, overrides)
    elif config is tokenizer is None and not strict and not overrides:
        chosen = handle.config
    else:
        raise ValueError(
            "the model is enabled already, with settings of its own: disable(model), or leave out "
            "config, tokenizer, strict and overrides"
        )
    if chunks_per_call < 1:
        raise ValueError(f"chunks_per_call must be >= 1, got {chunks_per_call}")
    span = layers_here(model)
    if cache is None:
        cache = new_cache(model)
    elif not isinstance(cache, ChunkedPrefillCache):
        raise ValueError(f"cache must be a ChunkedPrefillCache, got {type(cache).__name__}")
    elif span is not None:
        cache = StageCache.of(cache, span)
    past = cache.get_seq_length()
    name, tokens = read_prompt(input_ids, attention_mask, inputs_embeds, past, model)
    sparse: Any = contextlib.nullcontext(handle)
    if handle is None:
        sparse = enable(model, chosen, tokenizer=tokenizer, strict=strict)
    length = tokens.shape[1]

    def report(end: int) -> None:
        if on_progress is not None:
            on_progress(end, length)

    with sparse as used, torch.no_grad(), announce(used.state, past + length):
        if isinstance(cache, StageCache):
            stage = Stage(model, cache, tokens if name == "input_ids" else None)
            sizes = _call_sizes(length, 1, chosen)
            return _run_stages(stage, tokens, sizes, chunks_per_call, used, report)
        sizes = _call_sizes(length, chunks_per_call, chosen)
        options = {**last_logits_only(model), **cache_argument(model, cache), "use_cache": True}
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            output = model(**{name: tokens[:, end - size : end]}, **options)
            report(end)
        return output


def _run_stages(
    stage: Stage,
    tokens: Tensor,
    sizes: list[int],
    chunks_per_call: int,
    handle: PrefillHandle,
    report: Callable[[int], None],
) -> CausalLMOutputWithPast:
    """Prefill with the other stages of a model."""
    # Not every build of PyTorch has what this needs.
    from h2o_prefill.distributed import PipelinePrefill

    model, cache = stage.model, stage.cache
    pipeline = PipelinePrefill(stage, stage.group, cache.span, chunks_per_call)
    pipeline.ranks.check_same(
        {
            "settings": handle.state.resolve(model, stage.begin + tokens.shape[1]).to_string(),
            "tokenizer": digest(handle.state.token_text),
            "versions": (build_info()["version"], torch.__version__, transformers.__version__),
            "chunks_per_call": chunks_per_call,
            "dtype": str(model.dtype),
            "token ids": digest(str(stage.begin), cache.token_ids, tokens),
        }
    )
    width = model.config.get_text_config(decoder=True).hidden_size
    hidden = torch.empty(tokens.shape[0], 0, width, dtype=model.dtype, device=model.device)
    try:
        logits = pipeline.run(tokens, hidden, sizes, report)
    except BaseException:
        cache.failed = True
        raise
    return CausalLMOutputWithPast(logits=logits, **cache_argument(model, cache))


def read_prompt(
    prompt: Any,
    attention_mask: Tensor | None,
    inputs_embeds: Tensor | None,
    past: int,
    model: PreTrainedModel,
) -> tuple[str, Tensor]:
    """Return the argument's name and the tokens [B, T] or [B, T, hidden]; refuse padding."""
    if isinstance(prompt, Mapping) or hasattr(prompt, "input_ids"):
        prompt, mask = prompt.get("input_ids"), prompt.get("attention_mask")
        attention_mask = mask if attention_mask is None else attention_mask
    if (prompt is None) == (inputs_embeds is None):
        raise ValueError("either input_ids or inputs_embeds must be given")
    name, tokens, what = "input_ids", prompt, "[B, T]"
    if inputs_embeds is not None:
        name, tokens, what = "inputs_embeds", inputs_embeds, "[B, T, hidden size]"
    tokens = token_rows(tokens, model.device)
    if tokens.ndim != what.count(",") + 1 or tokens.shape[1] == 0:
        raise ValueError(f"{name} must be {what} with T >= 1, got {list(tokens.shape)}")
    if name == "input_ids":
        # Of several processes only the one that embeds would raise, and the others would wait.
        check_ids(tokens, model)
    if attention_mask is None:
        return name, tokens
    mask, (batch, new) = token_rows(attention_mask, tokens.device), tokens.shape[:2]
    if mask.shape not in ((batch, new), (batch, past + new)):
        raise ValueError(f"attention_mask must be {[batch, past + new]}, got {list(mask.shape)}")
    if not mask.all():
        raise ValueError("attention_mask must be without padding: prefill prompts one by one")
    return name, tokens


def call_tokens(chunks_per_call: int, config: PrefillConfig) -> int:
    """Return the tokens of a call of so many chunks, or of as many as a sparse call needs."""
    least = max(config.sparse_from, 2)
    return max(chunks_per_call, -(-least // config.chunk_size)) * config.chunk_size


def _call_sizes(length: int, chunks_per_call: int, config: PrefillConfig) -> list[int]:
    """Cut a length into calls of whole chunks, each of them sparse where one call would be."""
    step = call_tokens(chunks_per_call, config)
    sizes, rest = [step] * (length // step), length % step
    # A rest shorter than `min_prefill`, or of one token, as a decoding call, joins the last call.
    if sizes and rest < max(config.sparse_from, 2):
        sizes[-1] += rest
    elif rest:
        sizes.append(rest)
    return sizes
