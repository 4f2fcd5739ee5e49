"""Lexical recall: the search in a long text, and what recalled keys cost beyond their flops."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import torch
from common import options
from common.plan import Lengths, Plan
from common.report import Report, Row, ratio_fields
from common.timing import compare
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import load_text
from h2o_prefill.eval.attention_flops import sparse_dot_products
from h2o_prefill.eval.inputs.gguf import convert_gguf
from h2o_prefill.eval.inputs.models import packaged_gguf
from h2o_prefill.eval.inputs.text import encode
from h2o_prefill.eval.recalled_keys import RecalledKeys, find_recalled
from h2o_prefill.functional import NO_RECALL, sparse_attention
from h2o_prefill.presets import preset_config

COLUMNS = {
    "model": "{model}",
    "dtype": "{dtype}",
    "threads": "{threads}",
    "recall": "{recall}",
    "tokens": "{length}",
    "search ms": "{search_milliseconds:.2f}",
    "sort ms": "{sort_milliseconds:.2f}",
    "search / sort": "{search_by_sort:.2f} ({search_by_sort_q1:.2f} to {search_by_sort_q3:.2f})",
    "keys a block": "{keys_a_block:.0f}",
    "ms": "{milliseconds:.2f}",
    "ms without": "{milliseconds_without:.2f}",
    "time ratio": "{time_ratio:.3f} ({time_ratio_q1:.3f} to {time_ratio_q3:.3f})",
    "flop ratio": "{flop_ratio:.3f}",
    "excess %": "{excess_percent:.1f}",
    "time / h2o": "{time_by_h2o:.3f} ({time_by_h2o_q1:.3f} to {time_by_h2o_q3:.3f})",
    "flops / h2o": "{flops_by_h2o:.3f}",
}
_NARROW = preset_config("recommended", local_window=256, wide_layers=(0,))
VARIANTS = {
    "h2o, recall=4": preset_config("h2o", recall=4),
    "recommended": preset_config("recommended"),
    # Two layers of the same model.
    "narrow layer": _NARROW.replace(wide_layers=()),
    "wide layer": _NARROW.of_layer(0),
}
LENGTHS = Lengths(full=(4096, 8192), quick=(200,))
SEARCHED = 131072


@options.benchmark("recall", "dtype", shape="smollm2", lengths=LENGTHS, seconds=20.0)
def main(plan: Plan) -> None:
    """Time the search beside a stable sort of the ids, and the operator with recalled keys beside
    the operator without and beside the preset h2o.

    The excess is what recall makes the operator take longer than its flops say. Text: WikiText-2
    where H2O_PREFILL_WIKITEXT2 names it, else Python's help topics.
    """
    searched = 2000 if plan.quick else SEARCHED
    h2o = plan.config("h2o")
    configs = {
        name: _quick(h2o, config) if plan.quick else config for name, config in VARIANTS.items()
    }
    text, ids = _read_ids(max(searched, *plan.lengths), plan.quick)
    title = (
        f"lexical_recall over {text}: beside a stable sort of the ids; chunked_sparse_attention "
        "with it: beside the same without, and beside the preset h2o"
    )
    variants = {name: dataclasses.asdict(config) for name, config in configs.items()}
    with Report(plan, title, COLUMNS, lengths=plan.lengths, variants=variants) as report:
        for count in plan.threads:
            torch.set_num_threads(count)
            for name, config in configs.items():
                row = _search_row(ids[:, :searched], config, plan.seconds)
                report.add(recall=name, threads=count, length=searched, **row)
        for case in plan.cases():
            for name, config in configs.items():
                for length in plan.lengths:
                    qkv = case.heads.qkv(length, case.dtype)
                    row = _operator_row(qkv, ids[:, :length], config, h2o, plan.seconds)
                    report.add(**case.fields, recall=name, length=length, **row)


def _quick(small: PrefillConfig, config: PrefillConfig) -> PrefillConfig:
    """Return the recall of a config with the small sizes of a quick run."""
    return config.replace(
        chunk_size=small.chunk_size,
        local_window=small.local_window,
        heavy_budget=small.heavy_budget,
        recall_block=small.chunk_size // 4,
    )


def _search_row(ids: Tensor, config: PrefillConfig, seconds: float) -> Row:
    timings = compare(
        {
            "search": lambda: find_recalled(ids, config),
            "sort": lambda: ids.sort(dim=1, stable=True),
        },
        seconds,
    )
    return {
        "search_milliseconds": 1e3 * timings.median("search"),
        "sort_milliseconds": 1e3 * timings.median("sort"),
        **ratio_fields("search_by_sort", timings.ratio("search", "sort")),
        "keys_a_block": _keys_a_block(find_recalled(ids, config)),
        "rounds": timings.rounds,
    }


def _operator_row(
    qkv: tuple[Tensor, Tensor, Tensor],
    ids: Tensor,
    config: PrefillConfig,
    h2o: PrefillConfig,
    seconds: float,
) -> Row:
    length = ids.shape[1]
    lists = find_recalled(ids, config)
    recall = NO_RECALL if lists is None else (lists.offsets, lists.positions, lists.visible_from)
    timings = compare(
        {
            "with": lambda: sparse_attention(*qkv, None, config, recall),
            "without": lambda: sparse_attention(*qkv, None, config),
            "h2o": lambda: sparse_attention(*qkv, None, h2o),
        },
        seconds,
    )
    time_ratio = timings.ratio("with", "without")
    flops = sparse_dot_products(length, config, lists)
    flop_ratio = flops / sparse_dot_products(length, config)
    return {
        "milliseconds": 1e3 * timings.median("with"),
        "milliseconds_without": 1e3 * timings.median("without"),
        "keys_a_block": _keys_a_block(lists),
        **ratio_fields("time_ratio", time_ratio),
        "flop_ratio": flop_ratio,
        "excess_percent": 100 * (time_ratio.value / flop_ratio - 1),
        **ratio_fields("time_by_h2o", timings.ratio("with", "h2o")),
        "flops_by_h2o": flops / sparse_dot_products(length, h2o),
        "rounds": timings.rounds,
    }


def _keys_a_block(lists: RecalledKeys | None) -> float:
    return 0.0 if lists is None else lists.offsets.diff().double().mean().item()


def _read_ids(length: int, quick: bool) -> tuple[str, Tensor]:
    """Return the name of a text and its first tokens, int64 [1, length]; a short text repeats."""
    try:
        corpus = load_text("wikitext2")
    except ValueError:
        corpus = load_text("pydoc")
    tokens = None if quick else _model_tokens(corpus.text)
    if tokens is None:
        numbers: dict[str, int] = {}
        words = _words(corpus.text, length)
        tokens = torch.tensor([numbers.setdefault(word, len(numbers)) for word in words])
    repeats = -(-length // len(tokens))
    return corpus.name, tokens.repeat(repeats)[:length].unsqueeze(0)


def _model_tokens(text: str) -> Tensor | None:
    """Return a text's tokens by the default model's tokenizer, None if it is not installed."""
    try:
        folder = convert_gguf(packaged_gguf())
        from transformers import AutoTokenizer
    except ImportError:
        return None
    return encode(AutoTokenizer.from_pretrained(folder), text)


def _words(text: str, limit: int) -> Iterator[str]:
    """Go through the first words and signs of a text."""
    for number, match in enumerate(re.finditer(r"\w+|[^\w\s]", text)):
        if number == limit:
            return
        yield match[0]


app = options.command(main)

if __name__ == "__main__":
    app()
