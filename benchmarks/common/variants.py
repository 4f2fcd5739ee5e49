"""Variants of one model that share its weights, and how each prefills and decodes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

import h2o_prefill
from h2o_prefill import ChunkedPrefillCache, PrefixCache
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.observe import without_attention
from h2o_prefill.hf.cache import cache_argument

QUESTIONS = 10


def prefill_variants(
    model: Any, input_ids: Tensor, config: PrefillConfig
) -> dict[str, Callable[[], Tensor]]:
    """Return what prefills a prompt, each a callable that gives the last token's logits."""
    sparse, exact, bare = enabled_twin(model, config, len(input_ids[0])), twin(model), twin(model)
    h2o_prefill.enable(exact, "exact")
    bare_for_good = contextlib.ExitStack()  # as long as the callable lives
    bare_for_good.enter_context(without_attention(bare))
    pieces = input_ids.split(config.chunk_size, dim=1)
    return {
        "dense": lambda: prefill(model, [input_ids]),
        "dense_chunked": lambda: prefill(model, pieces),
        "exact": lambda: prefill(exact, [input_ids]),
        "sparse": lambda: prefill(sparse, [input_ids]),
        "no_attention": lambda _=bare_for_good: prefill(bare, [input_ids]),
    }


def compiled_prefill(model: Any, input_ids: Tensor, config: PrefillConfig) -> Callable[[], Tensor]:
    """Return the sparse variant of `prefill_variants` with a static cache, compiled when called."""
    sparse = enabled_twin(model, config, len(input_ids[0]))
    sparse.compile(fullgraph=True, dynamic=True)
    cache = StaticCache(config=model.config, max_cache_len=len(input_ids[0]))

    @torch.inference_mode()
    def call() -> Tensor:
        cache.reset()
        return prefill(sparse, [input_ids], cache)

    return call


def decode_variants(
    model: Any, input_ids: Tensor, config: PrefillConfig, steps: int
) -> dict[str, Callable[[], Tensor]]:
    """Return what decodes after one prompt, which each prefills here, once."""
    models = {"stock": model, "enabled": enabled_twin(model, config, len(input_ids[0]))}
    return {name: decoder(network, input_ids, steps) for name, network in models.items()}


def decoder(network: Any, input_ids: Tensor, steps: int) -> Callable[[], Tensor]:
    """Prefill a prompt; return what decodes so many tokens after it, greedily."""
    cache = DynamicCache(config=network.config)
    arguments = {**cache_argument(network, cache), "use_cache": True, "logits_to_keep": 1}
    with torch.inference_mode():
        first = network(input_ids, **arguments).logits[:, -1].argmax(-1, keepdim=True)

    @torch.inference_mode()
    def decode() -> Tensor:
        token, tokens = first, []
        for _ in range(steps):
            token = network(token, **arguments).logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(token[0, 0])
        cache.crop(-steps)
        return torch.stack(tokens)

    return decode


def session_variants(
    model: Any, input_ids: Tensor, config: PrefillConfig, path: Path, steps: int
) -> dict[str, Callable[[], object]]:
    """Return what answers questions about a text, pieces of it as long as the answers.

    "each" prefills the text with every question, "prefixes" with the first one into a
    `PrefixCache`, "session" once into a file, from which the answers start; "reopened" has the file
    already.
    """
    network = enabled_twin(model, config, len(input_ids[0]))
    prompts = [
        torch.cat([input_ids, x[None]], dim=1) for x in input_ids[0].split(steps)[:QUESTIONS]
    ]
    options = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False}

    def each() -> None:
        for prompt in prompts:
            network.generate(prompt, **options)

    def prefixes() -> None:
        store = PrefixCache(1 << 30)
        for prompt in prompts:
            cache, _ = store.prefill(network, prompt)
            network.generate(prompt, **cache_argument(network, cache), **options)

    @torch.inference_mode()
    def session() -> None:
        cache = ChunkedPrefillCache(config=network.config)
        network(input_ids, logits_to_keep=1, **cache_argument(network, cache))
        cache.save(path, network)
        reopened()

    def reopened() -> None:
        cache = ChunkedPrefillCache.load(path, network)
        for prompt in prompts:
            network.generate(prompt, **cache_argument(network, copy.deepcopy(cache)), **options)

    session()
    return {"each": each, "prefixes": prefixes, "session": session, "reopened": reopened}


@torch.inference_mode()
def prefill(model: Any, pieces: Sequence[Tensor], cache: Any = None) -> Tensor:
    """Return the logits of a prompt's last token, [vocabulary]; without a cache with a new one."""
    named = cache_argument(model, cache or DynamicCache(config=model.config))
    for piece in pieces:
        output = model(piece, **named, use_cache=True, logits_to_keep=1)
    return output.logits[0, -1]


def twin(model: nn.Module) -> Any:
    """Copy a model's modules and configs, not its weights."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def enabled_twin(model: Any, config: PrefillConfig, length: int) -> Any:
    """Return a twin that prefills sparsely: strictly, if prompts of `length` tokens are sparse."""
    sparse = twin(model)
    h2o_prefill.enable(sparse, config, strict=config.is_sparse_call(0, length))
    return sparse


def int8_twin(model: Any) -> Any:
    """Return a twin whose linear layers, but the output layer, take int8 weights and activations.

    Weights are rounded by row, activations by token when they come.
    """
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    rounded = twin(model)
    quantize_(rounded.get_decoder(), Int8DynamicActivationInt8WeightConfig(version=2))
    return rounded
