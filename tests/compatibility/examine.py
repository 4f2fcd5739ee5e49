"""Tiny models of every class, enabled beside stock: which are sparse, and whether all are right."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from compatibility.tiny_model import CannotBuild, TinyModel, build_tiny, random_prompt
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, EncoderDecoderCache, StaticCache

from h2o_prefill.hf import NAME, ChunkedPrefillCache, enable, register
from h2o_prefill.hf.attention import h2o_prefill_attention
from h2o_prefill.hf.call import Attended, Call, as_attention_function
from h2o_prefill.hf.kinds import layer_type
from h2o_prefill.hf.rules import dense_reason

TOKENS = 72
# Logits of float32 may differ by this much of the largest one.
TOLERANCE = 1e-4
CHUNK_SIZE = 16
HOLDS_ALL: dict[str, Any] = {
    "chunk_size": CHUNK_SIZE,
    "local_window": 40,
    "heavy_budget": 40,
    "min_prefill": None,
}
SMALL: dict[str, Any] = {**HOLDS_ALL, "local_window": 4, "heavy_budget": 4}
# Whole chunks; and calls that end inside a chunk, one of them too short to be sparse.
CALLS = ((TOKENS,), (32, 40), (24, 5, 43))
NEW_TOKENS = 3


@dataclass(frozen=True)
class Mode:
    """One way to run a prompt."""

    # By the model's own eager attention; else by the one that transformers chooses.
    eager: bool = False
    # With a cache: a `DynamicCache` for the stock model, a `ChunkedPrefillCache` for ours.
    cached: bool = False
    # New tokens of each call.
    calls: tuple[int, ...] = (TOKENS,)
    # With a `StaticCache`, for the stock model as for ours.
    static: bool = False
    # Without a cache given: the model makes one, if it makes any by default.
    own_cache: bool = False
    # By `generate`, without a cache of ours.
    generate: bool = False


MODES = (
    Mode(),
    Mode(own_cache=True),
    *(Mode(cached=True, calls=calls) for calls in CALLS),
    Mode(static=True, calls=CALLS[-1]),
    Mode(generate=True),
)


@dataclass
class Finding:
    """What the sweep found out about a class."""

    # Of the class.
    name: str
    # "causal", "encoder-decoder" or "composite".
    kind: str
    # "sparse", "dense", "refused" by `enable`, or "not run": no tiny model, or it fails
    # itself.
    result: str = "not run"
    # Attention layers that went sparse without a cache, and all that came to us.
    sparse: int = 0
    attention: int = 0
    # How many of the others there are of each kind, such as "sliding_attention".
    kinds: dict[str, int] = field(default_factory=dict)
    # Why it is dense, refused or not run; empty if all layers of full attention are sparse.
    reason: str = ""
    # What must not be: a mode, and what happened in it.
    wrong: list[str] = field(default_factory=list)


def examine(name: str, kind: str, **changes: Any) -> Finding:
    """Compare a tiny model of a class with itself enabled, in every mode."""
    finding = Finding(name, kind)
    try:
        tiny = build_tiny(name, **changes)
    except CannotBuild as error:
        finding.reason = str(error)
        return finding
    if tiny.prompt_name == "decoder_input_ids":
        finding.kind = "encoder-decoder"
    elif kind == "encoder-decoder":  # A mapping that has models with a tower for sound too.
        finding.kind = "composite"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _examine(tiny, finding)
    return finding


def _examine(tiny: TinyModel, finding: Finding) -> None:
    prompt = random_prompt(TOKENS)
    stock = _attempt(lambda: tiny(prompt, use_cache=False).logits)
    if isinstance(stock, Exception):
        finding.reason = f"stock model: {_one_line(stock)}"
        return
    try:
        with _collected_reasons() as reasons:
            enable(tiny.model, **HOLDS_ALL).disable()
    except ValueError as error:
        finding.result, finding.reason = "refused", str(error)
        return
    finding.result = "dense"
    for mode in MODES:
        _compare(tiny, prompt, mode, finding, reasons)
    _check_small_memory(tiny, prompt, finding)
    if _set_eager(tiny.model):
        for mode in MODES:
            _compare(tiny, prompt, replace(mode, eager=True), finding, reasons)
    finding.reason = "; ".join(reasons)


def _compare(
    tiny: TinyModel, prompt: Tensor, mode: Mode, finding: Finding, reasons: list[str]
) -> None:
    stock = _attempt(partial(_run, tiny, prompt, mode, DynamicCache))
    if isinstance(stock, Exception):
        return
    # What concerns static caches alone says nothing of the class.
    heard = [] if mode.static else reasons
    with _collected_reasons(heard), enable(tiny.model, **HOLDS_ALL), _watched() as decisions:
        ours = _attempt(partial(_run, tiny, prompt, mode, ChunkedPrefillCache))
    if mode == MODES[0]:
        _count(decisions, finding)
    _judge(stock, ours, str(mode), finding)


def _check_small_memory(tiny: TinyModel, prompt: Tensor, finding: Finding) -> None:
    for mode in (Mode(), Mode(cached=True, calls=CALLS[1])):
        stock = _attempt(partial(_run, tiny, prompt, mode, DynamicCache))
        if isinstance(stock, Exception):
            continue
        with enable(tiny.model, **SMALL):
            ours = _attempt(partial(_run, tiny, prompt, mode, ChunkedPrefillCache))
        name = f"small memory, {mode}"
        if isinstance(ours, Tensor) and not bool(ours.isfinite().all()):
            finding.wrong.append(f"{name}: not finite")
        chunk = slice(None) if finding.sparse == 0 else slice(CHUNK_SIZE)
        ours = ours if isinstance(ours, Exception) else ours[:, chunk]
        _judge(stock[:, chunk], ours, name, finding)


def _run(tiny: TinyModel, prompt: Tensor, mode: Mode, cache_class: Any) -> Tensor:
    """Return the logits [1, T, V] of a prompt, or of the tokens that were generated."""
    if mode.generate:
        made = tiny.model.generate(
            **{tiny.prompt_name: prompt},
            **tiny.others,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            num_beams=1,
            **({} if tiny.prompt_name == "input_ids" else {"decoder_start_token_id": 1}),
            output_logits=True,
            return_dict_in_generate=True,
        )
        return torch.stack(made.logits, dim=1)
    if not mode.cached and not mode.static:
        return tiny(prompt, **({} if mode.own_cache else {"use_cache": False})).logits
    cache = cache_class(config=tiny.model.config)
    if mode.static:
        cache = StaticCache(config=tiny.model.config, max_cache_len=TOKENS + NEW_TOKENS)
    if tiny.prompt_name == "decoder_input_ids":
        cache = EncoderDecoderCache(cache, DynamicCache(config=tiny.model.config))
    pieces = [
        tiny(piece, past_key_values=cache, use_cache=True).logits
        for piece in prompt.split(list(mode.calls), dim=1)
    ]
    return torch.cat(pieces, dim=1)


def _judge(stock: Tensor, ours: Tensor | Exception, where: str, finding: Finding) -> None:
    if isinstance(ours, Exception):
        finding.wrong.append(f"{where}: {_one_line(ours)}")
        return
    if stock.shape != ours.shape:
        finding.wrong.append(f"{where}: shape {list(ours.shape)}, stock {list(stock.shape)}")
        return
    scale = max(1.0, float(stock.abs().amax()))
    difference = float((ours - stock).abs().amax()) / scale
    if not difference <= TOLERANCE:
        finding.wrong.append(f"{where}: differs by {difference:.1e}")


def _count(decisions: dict[int, str], finding: Finding) -> None:
    finding.attention = len(decisions)
    for decision in decisions.values():
        if decision == "sparse":
            finding.sparse += 1
        else:
            finding.kinds[decision] = finding.kinds.get(decision, 0) + 1
    if finding.sparse:
        finding.result = "sparse"


@contextlib.contextmanager
def _watched() -> Iterator[dict[int, str]]:
    """Note for each attention layer, by its identity, whether it is sparse, or its kind."""
    decisions: dict[int, str] = {}

    @as_attention_function
    def attend(call: Call) -> Attended:
        if call.context is not None:
            sparse = dense_reason(call) is None
            decisions[id(call.module)] = "sparse" if sparse else layer_type(call.module)
        qkv = call.query, call.key, call.value
        options = {"dropout": call.dropout, "scaling": call.scaling, **call.kwargs}
        return h2o_prefill_attention(call.module, *qkv, call.mask, **options)

    AttentionInterface.register(NAME, attend)
    try:
        yield decisions
    finally:
        register()


@contextlib.contextmanager
def _collected_reasons(reasons: list[str] | None = None) -> Iterator[list[str]]:
    """Collect what we warn of, each reason once."""
    found: list[str] = [] if reasons is None else reasons
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    for warning in caught:
        text = str(warning.message)
        if text.startswith("h2o_prefill: "):
            reason = text.removeprefix("h2o_prefill: ").removeprefix("dense attention: ")
            if reason not in found:
                found.append(reason)


def _attempt(context: Callable[[], Tensor]) -> Any:
    """Return what a call returns, or what it raises: any error is a finding."""
    try:
        return context()
    except Exception as error:
        return error


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160]


def _set_eager(model: Any) -> bool:
    """Switch a model over to eager attention; False if it cannot be, or is eager already."""
    text = model.config.get_text_config(decoder=True)
    if text._attn_implementation == "eager":
        return False
    try:
        model.set_attn_implementation("eager")
    except (ValueError, NotImplementedError):
        return False
    return bool(text._attn_implementation == "eager")
