"""Sparse prefill of one layer: its time, the time of lexical recall, and its memory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import re
from collections.abc import Callable
from functools import partial

import torch
from common.attention import beside_sdpa, sdpa, sdpa_calls
from common.benchmark import SHAPES, Case, Plan, benchmark, new_app
from common.compare import compare
from common.machine import (
    allocated_bytes,
    first_call_peak_bytes,
    profiled_rounds,
    resident_bytes,
)
from common.report import Report, Row
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention_flops import dense_dot_products, find_recalled, sparse_dot_products
from h2o_prefill.eval.timing import peak_bytes
from h2o_prefill.functional import NO_RECALL, RecallLists, sparse_attention
from h2o_prefill.generation import load_text
from h2o_prefill.generation.gguf import convert_gguf
from h2o_prefill.generation.models import packaged_gguf
from h2o_prefill.generation.text import encode
from h2o_prefill.presets import SPARSE_PRESETS, preset_config

app = new_app()

CROSSOVER_LENGTHS = (
    (1, 512, 1024, 1100, 1300, 1536, 2048, 2560, 3072, 4096, 8192, 16384, 32768, 65536),
    (1, 64, 200),
)
PREFILL_LENGTHS = ((1, 64, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536), (1, 64, 200))
RECALL_LENGTHS = ((4096, 8192), (200,))
MEMORY_LENGTHS = ((1024, 2048, 4096, 8192, 16384), (64, 200))

SEARCHED_TOKENS = 131072
RECALLS = {
    "h2o, recall=4": preset_config("h2o", recall=4),
    "recommended": preset_config("recommended"),
}


@benchmark(
    app, "prefill", "dtype", "shape", "preset", "device", lengths=PREFILL_LENGTHS, seconds=30.0
)
def prefill(plan: Plan) -> None:
    """Time the whole operator against torch SDPA (causal, enable_gqa) over the same tokens.

    Presets with lexical recall get the lists of a text, found before. On a GPU every backend of
    SDPA is timed, and the fastest is the baseline. Lengths go up until the next one would take
    longer than --seconds. "efficiency %" is the speedup over the fewest threads of --threads in the
    same run, divided by how many times the threads there are.
    """
    config = plan.config()
    find = _recall_finder(plan, config)
    fewest: dict[tuple[object, ...], tuple[int, float]] = {}
    sizes = f"S={config.chunk_size}, M={config.memory_size}"
    title = f"chunked_sparse_attention, {sizes}: beside torch SDPA (causal, enable_gqa)"
    with Report(plan, title, preset=plan.preset, lengths=plan.lengths) as report:
        for case in plan.cases():
            last: tuple[int, float] | None = None
            for length in plan.lengths:
                if not plan.affords(length, last):
                    report.note(f"N >= {length} left out, they need a larger --seconds")
                    break
                row, taken = _prefill_row(case, length, config, find(length), plan.seconds)
                time = row["sparse_milliseconds"]
                key = (case.heads, case.dtype, length)
                threads, base = fewest.setdefault(key, (case.threads, time))
                efficiency = 100 * (base * threads) / (time * case.threads)
                report.add(**case.fields, length=length, **row, efficiency_percent=efficiency)
                # Of long prompts alone: a short one is mostly overhead, which does not grow.
                last = (length, taken) if length >= 512 else last


def _prefill_row(
    case: Case, length: int, config: PrefillConfig, lists: RecallLists, seconds: float
) -> tuple[Row, float]:
    """Return a row, and the seconds that one call of every candidate took."""
    q, k, v = case.qkv(length)
    baselines = sdpa_calls(q, k, v, causal=True)
    calls = {**baselines, "sparse": _sparse_call((q, k, v), config, lists)}
    timings = case.compare(calls, seconds)
    best, speedup = beside_sdpa(timings, "sparse", baselines)
    dense_flops = case.heads.attention_flops(dense_dot_products(length))
    sparse_flops = case.heads.attention_flops(sparse_dot_products(length, config, lists))
    flop_ratio = dense_flops / sparse_flops
    row = {
        "dense_milliseconds": 1e3 * timings.median(best),
        "dense_gflops": dense_flops / timings.median(best) / 1e9,
        "sparse_milliseconds": 1e3 * timings.median("sparse"),
        "sparse_gflops": sparse_flops / timings.median("sparse") / 1e9,
        **speedup,
        "flop_ratio": flop_ratio,
        "speedup_by_flops": speedup["speedup"] / flop_ratio,
    }
    return row, sum(map(timings.median, calls))


@benchmark(
    app,
    "crossover",
    "dtype",
    "device",
    shape=",".join(SHAPES),
    lengths=CROSSOVER_LENGTHS,
    seconds=10.0,
)
def crossover(plan: Plan) -> None:
    """Time the attention that min_prefill "auto" chooses against the fastest dense attention.

    Dense attention is of this library and of PyTorch. Random tensors have larger errors than text,
    so memory sets may only double. "product" is the cost of a query-key product of the preset h2o
    in products of dense attention: its median over lengths of two chunks and more is the device's
    row in csrc/common/crossover.cpp.
    """
    title = "attention as min_prefill=auto chooses it, beside the fastest dense attention"
    with Report(plan, title, lengths=plan.lengths) as report:
        for case, name in itertools.product(plan.cases(), SPARSE_PRESETS):
            config = plan.config(name)
            config = config.replace(max_widen=min(config.max_widen, 2))
            find, last = _recall_finder(plan, config), None
            for length in plan.lengths:
                if not plan.affords(length, last):
                    break
                row, taken = _crossover_row(case, length, config, find(length), plan.seconds)
                report.add(**case.fields, preset=name, length=length, **row)
                last = (length, taken) if length >= 512 else last
        where = torch.device("cuda" if plan.on_gpu else "cpu")
        device, *_ = torch.ops.h2o_prefill.device_cost(where, torch.float32)
        report.note(f"rows of csrc/common/crossover.cpp for {device}: the medians of product")


def _crossover_row(
    case: Case, length: int, config: PrefillConfig, lists: RecallLists, seconds: float
) -> tuple[Row, float]:
    """Return a row, and the seconds that one call of every candidate took."""
    q, k, v = case.qkv(length)
    dense = {**sdpa_calls(q, k, v, causal=True), "exact": partial(ops.dense_attention, q, k, v)}
    timings = case.compare({**dense, "sparse": _sparse_call((q, k, v), config, lists)}, seconds)
    fastest = min(dense, key=timings.median)
    ratio = timings.ratio(fastest, "sparse").value
    is_sparse = length >= config.shortest_sparse_prompt(q)
    chosen = "sparse" if is_sparse else fastest if case.on_gpu else "exact"
    flops = dense_dot_products(length) / sparse_dot_products(length, config, lists)
    row = {
        "fastest_dense": fastest,
        "dense_milliseconds": 1e3 * timings.median(fastest),
        "sparse_speedup": ratio,
        "product": flops / ratio if not config.recall else None,
        "chosen": chosen,
        "speedup": timings.ratio(fastest, chosen).value if chosen != fastest else 1.0,
    }
    return row, sum(map(timings.median, (*dense, "sparse")))


def _recall_finder(plan: Plan, config: PrefillConfig) -> Callable[[int], RecallLists]:
    """Return what finds the keys that the first tokens of a text recall."""
    if not config.recall:
        return lambda length: NO_RECALL
    _, ids = _read_ids(max(plan.lengths), plan.quick)
    return lambda length: find_recalled(ids[:, :length], config)


def _sparse_call(
    qkv: tuple[Tensor, Tensor, Tensor], config: PrefillConfig, lists: RecallLists
) -> Callable[[], object]:
    on_device = tuple(x if x is None else x.to(qkv[0].device) for x in lists)
    return partial(sparse_attention, *qkv, None, config, on_device)


@benchmark(
    app,
    "kernels",
    "preset",
    device="cuda",
    shape="llama3",
    lengths=((8192, 32768, 131072), (200,)),
)
def kernels(plan: Plan) -> None:
    """Divide one prefill on a GPU among its kernels, by PyTorch's profiler.

    "elsewhere" is the time in which none of them ran: what waits for the host, and gaps.
    """
    if not plan.on_gpu:
        raise ValueError("the kernels of a GPU need --device cuda")
    config = plan.config()
    find = _recall_finder(plan, config)
    title = f"GPU kernels of chunked_sparse_attention, S={config.chunk_size}"
    with Report(plan, title, preset=plan.preset, lengths=plan.lengths) as report:
        for case in plan.cases():
            for length in plan.lengths:
                sparse = _sparse_call(case.qkv(length), config, find(length))
                whole = case.compare({"sparse": sparse}, plan.seconds).median("sparse")
                *_, by_kernel = profiled_rounds(sparse, 0.0)
                by_kernel["elsewhere"] = (whole - sum(time for time, _ in by_kernel.values()), 1)
                for name, (time, launches) in sorted(by_kernel.items(), key=lambda x: -x[1][0]):
                    report.add(
                        **case.fields,
                        length=length,
                        kernel=_short_name(name),
                        milliseconds=1e3 * time,
                        percent=100 * time / whole,
                        launches=launches,
                    )


def _short_name(kernel: str) -> str:
    """Return a kernel's name without namespaces, return type and arguments."""
    name = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.sub(r"\b\w+::", "", name.split("(")[0])[:60]


@benchmark(app, "recall", "dtype", shape="smollm2", lengths=RECALL_LENGTHS, seconds=20.0)
def recall(plan: Plan) -> None:
    """Time lexical recall beside a stable sort of the ids, and the operator with recalled keys.

    The operator is timed beside itself without recall, and beside the preset h2o. The excess is
    what recall makes it take longer than its flops say. Text: WikiText-2 where
    H2O_PREFILL_WIKITEXT2 names it, else Python's help topics.
    """
    searched = 2000 if plan.quick else SEARCHED_TOKENS
    h2o = plan.config("h2o")
    configs = {name: _quick(h2o, each) if plan.quick else each for name, each in RECALLS.items()}
    text, ids = _read_ids(max(searched, *plan.lengths), plan.quick)
    title = f"lexical_recall over {text} beside a stable sort; chunked_sparse_attention with it"
    variants = {name: dataclasses.asdict(config) for name, config in configs.items()}
    with Report(plan, title, lengths=plan.lengths, variants=variants) as report:
        for count in plan.each_threads():
            for name, config in configs.items():
                row = _search_row(ids[:, :searched], config, plan.seconds)
                report.add(recall=name, threads=count, length=searched, **row)
        for case in plan.cases():
            for name, config in configs.items():
                for length in plan.lengths:
                    row = _recall_row(case, ids[:, :length], config, h2o, plan.seconds)
                    report.add(**case.fields, recall=name, length=length, **row)


def _quick(small: PrefillConfig, config: PrefillConfig) -> PrefillConfig:
    """Return the recall of a config with the small sizes of a quick run."""
    sizes = {name: getattr(small, name) for name in ("chunk_size", "local_window", "heavy_budget")}
    return config.replace(**sizes)


def _search_row(ids: Tensor, config: PrefillConfig, seconds: float) -> Row:
    search, sort = partial(find_recalled, ids, config), partial(ids.sort, dim=1, stable=True)
    timings = compare({"search": search, "sort": sort}, seconds)
    return {
        "search_milliseconds": 1e3 * timings.median("search"),
        "sort_milliseconds": 1e3 * timings.median("sort"),
        **timings.ratio("search", "sort").fields("search_by_sort"),
        "keys_a_block": _keys_a_block(search()),
        "rounds": timings.rounds,
    }


def _recall_row(
    case: Case, ids: Tensor, config: PrefillConfig, h2o: PrefillConfig, seconds: float
) -> Row:
    length = ids.shape[1]
    qkv = case.qkv(length)
    lists = find_recalled(ids, config)
    calls = {
        "with": partial(sparse_attention, *qkv, None, config, lists),
        "without": partial(sparse_attention, *qkv, None, config),
        "h2o": partial(sparse_attention, *qkv, None, h2o),
    }
    timings = compare(calls, seconds)
    time_ratio = timings.ratio("with", "without")
    flops = sparse_dot_products(length, config, lists)
    flop_ratio = flops / sparse_dot_products(length, config)
    return {
        "milliseconds": 1e3 * timings.median("with"),
        "milliseconds_without": 1e3 * timings.median("without"),
        "keys_a_block": _keys_a_block(lists),
        **time_ratio.fields("time_ratio"),
        "flop_ratio": flop_ratio,
        "excess_percent": 100 * (time_ratio.value / flop_ratio - 1),
        **timings.ratio("with", "h2o").fields("time_by_h2o"),
        "flops_by_h2o": flops / sparse_dot_products(length, h2o),
        "rounds": timings.rounds,
    }


def _keys_a_block(lists: RecallLists) -> float:
    offsets = lists[0]
    return 0.0 if offsets is None else offsets.diff().double().mean().item()


def _read_ids(length: int, quick: bool) -> tuple[str, Tensor]:
    """Return the name of a text and its first tokens, int64 [1, length]; a short text repeats.

    The default model's tokenizer makes them; without it and in a quick run, words and signs.
    """
    try:
        corpus = load_text("wikitext2")
    except ValueError:
        corpus = load_text("pydoc")
    words = re.findall(r"\w+|[^\w\s]", corpus.text)[:length]
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    tokens = torch.tensor([numbers[word] for word in words])
    if not quick:
        with contextlib.suppress(ImportError):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(convert_gguf(packaged_gguf()))
            tokens = encode(tokenizer, corpus.text)
    return corpus.name, tokens.repeat(-(-length // len(tokens)))[:length].unsqueeze(0)


@benchmark(app, "allocations", "dtype", "shape", "preset", lengths=MEMORY_LENGTHS)
def allocations(plan: Plan) -> None:
    """Count the bytes of one layer's prefill beside dense SDPA's, then run 100 prompts.

    State (scores and memory set) stays with the KV cache of its layer. The workspace lives for one
    call: layers share it one after another. Growth is from the middle of the run to its end, over
    prompts of random lengths.
    """
    config = plan.config()
    prompts = 10 if plan.quick else 100
    title = f"memory of one layer, S={config.chunk_size}, M={config.memory_size}"
    with Report(plan, title, preset=plan.preset, lengths=plan.lengths) as report:
        for case in plan.cases():
            for length in plan.lengths:
                report.add(**case.fields, length=length, **_memory_row(case, length, config))
            report.add(**case.fields, prompts=prompts, **_growth_row(case, config, prompts))


def _memory_row(case: Case, length: int, config: PrefillConfig) -> Row:
    q, k, v = case.qkv(length)
    kv_bytes = k.nbytes + v.nbytes
    out, state = sparse_attention(q, k, v, None, config)
    state_bytes = state.scores.nbytes + state.memory.nbytes
    # First, since PyTorch's profiler wants to begin in the main thread.
    dense = peak_bytes(sdpa(q, k, v, causal=True))
    sparse = first_call_peak_bytes(lambda: sparse_attention(q, k, v, None, config))
    workspace = sparse - out.nbytes - state_bytes
    return {
        "kv_megabytes": kv_bytes / 1e6,
        "state_megabytes": state_bytes / 1e6,
        "state_percent": 100 * state_bytes / kv_bytes,
        "workspace_megabytes": workspace / 1e6,
        "workspace_percent": 100 * workspace / (case.heads.layers * kv_bytes),
        "dense_workspace_megabytes": (dense - out.nbytes) / 1e6,
    }


def _growth_row(case: Case, config: PrefillConfig, prompts: int) -> Row:
    chooser = random.Random(0)
    longest = 3 * config.chunk_size
    qkv = case.qkv(longest)
    measures = {"resident": resident_bytes, "allocated": allocated_bytes}
    # Of their final length from the start: the lists must not grow with the prompts.
    sizes: dict[str, list[int | None]] = {name: [0] * prompts for name in measures}
    for prompt in range(prompts):
        # The longest first, so that what comes later needs nothing new.
        length = chooser.randint(1, longest) if prompt else longest
        sparse_attention(*(x[:, :, :length] for x in qkv), None, config)
        for name, measure in measures.items():
            sizes[name][prompt] = measure()
    growth = {f"{name}_growth_kilobytes": _growth(values) for name, values in sizes.items()}
    return {**{f"{name}_bytes": values for name, values in sizes.items()}, **growth}


def _growth(sizes: list[int | None]) -> float | None:
    """Return how far the second half's highest is above the first half's, in kB."""
    if None in sizes:
        return None
    half = len(sizes) // 2
    return (max(sizes[half:]) - max(sizes[:half])) / 1e3  # type: ignore[type-var, operator]


if __name__ == "__main__":
    app()
