"""Tiny models of transformers' classes, enabled beside stock, and the page classes.md of them all.

`PYTHONPATH=tests python -m compatibility.examine` writes the page for the installed transformers.
"""

import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from compatibility.tiny_model import (
    CannotBuild,
    TinyModel,
    build_tiny,
    model_classes,
    random_prompt,
)
from rich.progress import track
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from h2o_prefill.hf import ChunkedPrefillCache, enable
from h2o_prefill.hf.kinds import WINDOWED

PAGE = Path(__file__).parent / "classes.md"
TOKENS = 72
# Logits of float32 may differ by this much of the largest one.
TOLERANCE = 1e-4
SIZES: dict[str, Any] = {"chunk_size": 16, "min_prefill": None}
HOLDS_ALL: dict[str, Any] = {**SIZES, "local_window": 40, "heavy_budget": 40}
SMALL: dict[str, Any] = {**SIZES, "local_window": 4, "heavy_budget": 4}
# Whole chunks; and calls that end inside a chunk, one of them too short to be sparse.
CALLS = {"a cache": (72,), "chunks": (32, 40), "calls": (24, 5, 43), "static": (24, 5, 43)}
WAYS = ("no cache", "own cache", *CALLS, "generate")
HEADINGS = {
    "sparse": ("Sparse", "At least one layer is sparse when a prompt comes in one call."),
    "dense": ("Dense", "The model computes what it computes without h2o_prefill."),
    "refused": ("Refused by `enable`", "`enable` raises ValueError."),
    "not run": (
        "Not examined",
        "The default config makes no tiny model, or the model does not run on text alone.",
    ),
}


@dataclass
class Finding:
    """What was found out about a class."""

    name: str
    result: str = "not run"
    # Attention layers that went sparse without a cache, all, and the kinds of the others.
    sparse: int = 0
    attention: int = 0
    kinds: list[str] = field(default_factory=list)
    # Why it is dense, refused or not run; empty if all layers of full attention are sparse.
    reason: str = ""
    # What must not be: a way to call it, and what happened.
    wrong: list[str] = field(default_factory=list)

    @property
    def row(self) -> str:
        """Why the class, or a part of its layers, is dense, as in the page."""
        if self.result == "not run":
            return "not examined"
        parts = [self.reason.replace(f"of {self.name} ", "").replace(f"{self.name} ", "it ")]
        if self.sparse:
            words = ((kind, "exact" if kind in WINDOWED else "dense") for kind in self.kinds)
            parts.append("; ".join(f"{kind.replace('_', ' ')} layers {how}" for kind, how in words))
        text = "; ".join(x for x in (*parts, *(f"WRONG: {x}" for x in self.wrong)) if x)
        return (text or "all attention layers").replace("|", "\\|").replace("<", "&lt;")


def examine(name: str, **changes: Any) -> Finding:
    """Compare a tiny model of a class with itself enabled, in every way."""
    finding, reasons = Finding(name), dict[str, None]()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tiny = build_tiny(name, **changes)
        except CannotBuild as error:
            finding.reason = str(error)
            return finding
        stock = _attempt(tiny, "no cache", None)
        if isinstance(stock, Exception):
            finding.reason = f"stock model: {_one_line(stock)}"
            return finding
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                enable(tiny.model, **HOLDS_ALL).disable()
        except ValueError as error:
            finding.result, finding.reason = "refused", str(error)
            return finding
        finding.result = "dense"
        _add(reasons, caught)
        for way in WAYS:
            _compare(tiny, way, finding, reasons)
        if _set_eager(tiny.model):
            for way in WAYS:
                _compare(tiny, way, finding, reasons)
    finding.reason = "; ".join(reasons)
    return finding


def _compare(tiny: TinyModel, way: str, finding: Finding, reasons: dict[str, None]) -> None:
    stock = _attempt(tiny, way, None)
    if isinstance(stock, Exception):
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = _attempt(tiny, way, HOLDS_ALL, None if finding.attention else finding)
    if way != "static":  # what concerns static caches alone says nothing of the class
        _add(reasons, caught)
    _judge(stock, whole, way, finding)
    if way in ("no cache", "chunks"):
        small = _attempt(tiny, way, SMALL)
        same = slice(SIZES["chunk_size"] if finding.sparse else None)
        _judge(stock, small, f"small memory, {way}", finding, same)


def _attempt(
    tiny: TinyModel, way: str, settings: dict[str, Any] | None, finding: Finding | None = None
) -> Any:
    """Return the logits of a prompt, or of generated tokens, or what was raised instead."""
    cache_class = DynamicCache if settings is None else ChunkedPrefillCache
    try:
        if settings is None:
            return _logits(tiny, way, cache_class)
        with enable(tiny.model, **settings) as handle:
            logits = _logits(tiny, way, cache_class)
            if finding is not None:
                called = [x for x in handle.report() if x.sparse_calls or x.dense_calls]
                others = [x.kind for x in called if not x.sparse_calls]
                finding.kinds, finding.attention = list(dict.fromkeys(others)), len(called)
                finding.sparse = len(called) - len(others)
                finding.result = "sparse" if finding.sparse else "dense"
            return logits
    # Any error is a finding.
    except Exception as error:
        return error


def _logits(tiny: TinyModel, way: str, cache_class: Any) -> Tensor:
    prompt, config = random_prompt(TOKENS), tiny.model.config
    if way == "generate":
        start = {} if tiny.prompt_name == "input_ids" else {"decoder_start_token_id": 1}
        tokens = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "num_beams": 1}
        output = {"output_logits": True, "return_dict_in_generate": True}
        inputs = {tiny.prompt_name: prompt, **tiny.others}
        made = tiny.model.generate(**inputs, **start, **tokens, **output)
        return torch.stack(made.logits, dim=1)
    if way not in CALLS:
        return tiny(prompt, **({} if way == "own cache" else {"use_cache": False})).logits
    cache = cache_class(config=config)
    if way == "static":
        cache = StaticCache(config=config, max_cache_len=TOKENS + 3)
    if tiny.prompt_name == "decoder_input_ids":
        cache = EncoderDecoderCache(cache, DynamicCache(config=config))
    pieces = prompt.split(list(CALLS[way]), dim=1)
    return torch.cat([tiny(x, past_key_values=cache, use_cache=True).logits for x in pieces], dim=1)


def _judge(stock: Tensor, ours: Any, where: str, finding: Finding, same: Any = None) -> None:
    if isinstance(ours, Exception):
        finding.wrong.append(f"{where}: {_one_line(ours)}")
    elif stock.shape != ours.shape or not bool(ours.isfinite().all()):
        finding.wrong.append(f"{where}: not finite, or shape {list(ours.shape)}")
    else:
        difference = (ours - stock)[:, same or slice(None)].abs().amax()
        if not difference <= TOLERANCE * stock.abs().amax().clamp(min=1):
            finding.wrong.append(f"{where}: differs by {difference:.1e}")


def _add(reasons: dict[str, None], caught: list[warnings.WarningMessage]) -> None:
    texts = (str(x.message) for x in caught)
    ours = (x.removeprefix("h2o_prefill: ") for x in texts if x.startswith("h2o_prefill: "))
    reasons.update(dict.fromkeys(x.removeprefix("dense attention: ") for x in ours))


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


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


def page(findings: list[Finding]) -> str:
    """Return the page: a table for each result, a row for each reason."""
    parts = [
        "# Which classes are prefilled sparsely",
        f"Classes of transformers {transformers.__version__} (torch {torch.__version__}), from the "
        "auto mappings for causal language models, encoder-decoders and composite models, fed "
        "with text alone. `PYTHONPATH=tests python -m compatibility.examine` compares each, as a "
        f"tiny random float32 model with its default config, with itself enabled: {TOKENS} tokens "
        "in chunks of 16. With memory sets that hold everything, logits differ from the stock "
        f"model's by at most {TOLERANCE:g} of the largest, with every kind of cache and by "
        "`generate`; with small memory sets they are finite, and equal in the first chunk.",
    ]
    for result, (heading, about) in HEADINGS.items():
        groups: dict[str, list[str]] = defaultdict(list)
        for finding in findings:
            if finding.result == result:
                groups[finding.row].append(f"`{finding.name}`")
        if groups:
            rows = [f"| {why} | {', '.join(names)} |" for why, names in sorted(groups.items())]
            title = f"## {heading} ({sum(map(len, groups.values()))})"
            parts += [title, about, "\n".join(["| why | classes |", "| --- | --- |", *rows])]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page([examine(name) for name in track(model_classes())]), encoding="utf-8")
