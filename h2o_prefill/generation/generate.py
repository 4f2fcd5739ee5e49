"""Text generation with the prefill timed on its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer

from h2o_prefill.generation.runs import check_length, generate_greedily
from h2o_prefill.hf.cache import ChunkedPrefillCache, cache_argument
from h2o_prefill.package import PrefillPackage


@dataclass(frozen=True)
class GenerationTiming:
    """How long a generation took."""

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float  # to the first new token
    decode_seconds: float  # from the first new token to the last


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, as by `generate(do_sample=True)` of transformers."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """Return the arguments of `generate`."""
        fields = asdict(self)
        del fields["seed"]
        return {"do_sample": True, **fields}

    def sampler(self) -> Any:
        """Return what draws the tokens of packages, as `torch.manual_seed` and `generate` do."""
        return torch.classes.h2o_prefill.Sampler(**asdict(self))


class _TimedStreamer(TextStreamer):
    """Passes on text, and notes when each new token came."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.times: list[float] = []
        self.last = torch.empty(0)  # the last token

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
            self.last = value
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.on_text(text)


def generate_timed(
    model: Any,
    tokenizer: Any,
    input_ids: Tensor,
    max_new_tokens: int,
    on_text: Callable[[str], None],
    past: ChunkedPrefillCache | PrefillPackage | None = None,
    sampling: Sampling | None = None,
    draft_tokens: int = 0,
) -> GenerationTiming:
    """Continue a prompt, greedily without `sampling`, and pass on the text as it is generated.

    If `past`, a cache or the package itself, has tokens, the prompt goes on from them. It has all
    of the answer at the end, where the last token would be missing otherwise. `draft_tokens` is
    for packages.
    """
    packaged = isinstance(model, PrefillPackage)
    before = None if past is None else past.token_ids
    prompt = input_ids if before is None else torch.cat([before, input_ids.to(before)], dim=1)
    options: dict[str, Any] = {} if past is None or packaged else cache_argument(model, past)
    if not packaged:
        check_length(model, prompt.shape[1] + max_new_tokens, "prompt and new tokens")
        prompt = prompt.to(model.device)
    streamer = _TimedStreamer(tokenizer, on_text)
    start = time.perf_counter()
    if packaged:
        streamer.put(input_ids)
        model.generate(
            input_ids,
            max_new_tokens,
            lambda token: streamer.put(torch.tensor([token])),
            sampler=None if sampling is None else sampling.sampler(),
            draft_tokens=draft_tokens,
        )
        streamer.end()
    else:
        chosen = {}
        if sampling is not None:
            torch.manual_seed(sampling.seed)
            chosen = sampling.options()
        generate_greedily(model, prompt, max_new_tokens, streamer=streamer, **chosen, **options)
    times, last = streamer.times, streamer.last.reshape(1, 1)
    if past is not None:
        with torch.no_grad():
            model.forward(last) if packaged else model(last.to(model.device), **options)
    return GenerationTiming(input_ids.shape[1], len(times), times[0] - start, times[-1] - times[0])


def open_session(path: str | Path, model: Any) -> ChunkedPrefillCache | PrefillPackage:
    """Return the package, or a cache for the model, with the text of a session if there is one."""
    exists = Path(path).expanduser().exists()
    if isinstance(model, PrefillPackage):
        if exists:
            model.load(path)
        return model
    if not exists:
        return ChunkedPrefillCache(config=model.config)
    cache = ChunkedPrefillCache.load(path, model)
    if cache.token_ids is None:
        raise ValueError(f"session {str(path)!r} must have token ids to be continued by a text")
    return cache
