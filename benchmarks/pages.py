"""Prefill of one layer of a request whose keys and values lie in pages, in steps, as in engines."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from common.attention import sdpa_calls
from common.benchmark import Plan, benchmark, new_app, parse_numbers
from common.report import Report
from torch import Tensor

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import NO_RECALL

app = new_app()

# Without recall, whose lists are of a text; random keys widen budgets as far as they may.
PRESETS = ("exact", "h2o", "recommended,recall=0,max_widen=2")
Call = Callable[[], Tensor]


@benchmark(
    app,
    "pages",
    "dtype",
    "device",
    shape="llama3",
    lengths=((8192, 32768, 65536, 131072), (200,)),
    seconds=6.0,
)
def pages(
    plan: Plan,
    size: Annotated[
        str | None, typer.Option("--size", help="Tokens of a page. Default: 16,128,1024.")
    ] = None,
    step: Annotated[
        str | None, typer.Option("--step", help="Tokens of a step. Default: 8192.")
    ] = None,
    ranks: Annotated[
        str | None, typer.Option("--ranks", help="Ranks that share the heads. Default: 1.")
    ] = None,
    fa3: Annotated[
        Path | None,
        typer.Option("--fa3", help="The folder vllm_flash_attn of vLLM's wheel, with _vllm_fa3_C."),
    ] = None,
) -> None:
    """Time a prompt in steps by `paged_sparse_attention_`, beside SDPA in one call.

    SDPA has keys and values that are contiguous. "fa3" is vLLM's FlashAttention-3 over the same
    pages and steps. "gather" copies the pages of all steps out by PyTorch. Before that every preset
    is checked: to the bit as `chunked_sparse_attention` of the whole prompt, and without a wait for
    the GPU.
    """
    flash = None if fa3 is None else _flash_attention_3(fa3)
    sizes = parse_numbers("--size", size, [16] if plan.quick else [16, 128, 1024])
    steps = parse_numbers("--step", step, [128] if plan.quick else [8192])
    shares = parse_numbers("--ranks", ranks, [1])
    presets = {"sparse": plan.config()} if plan.quick else {x: plan.config(x) for x in PRESETS}
    title = "one layer over pages, in steps: milliseconds beside SDPA"
    with Report(plan, title, presets=[*presets], lengths=plan.lengths) as report:
        for case, share in itertools.product(plan.cases(), shares):
            heads = case.heads
            parts = heads.query_heads // share, heads.kv_heads // share
            rank = replace(case, heads=replace(heads, query_heads=parts[0], kv_heads=parts[1]))
            for length, rows, tokens in itertools.product(plan.lengths, sizes, steps):
                q, k, v = rank.qkv(length)
                cache, table = _in_pages(k, v, rows)
                key, value = cache.chunk(2, dim=3)
                views = key, value
                calls: dict[str, Call] = dict(sdpa_calls(q, k, v, causal=True))
                baselines = [*calls]
                for name, config in presets.items():
                    calls[name] = partial(_prefill, q, views, table, config, tokens)
                    _check(calls[name], (q, k, v), config)
                calls["gather"] = partial(_gather, cache, table, length, tokens)
                if flash is not None:
                    calls["fa3"] = partial(_flash, flash, q, views, table, tokens)
                timings = rank.compare(calls, plan.seconds)
                best = min(baselines, key=timings.median)
                for name in [best, *(x for x in calls if x not in baselines)]:
                    report.add(
                        **rank.fields,
                        length=length,
                        page=rows,
                        step=tokens,
                        ranks=share,
                        variant=name,
                        milliseconds=1e3 * timings.median(name),
                        **timings.ratio(best, name).fields("speedup"),
                    )


def _in_pages(key: Tensor, value: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return pages [pages, Hkv, size, 2 D], rows by tokens as vLLM's, and a shuffled table."""
    (_, heads, length, dim), count = key.shape, -(-key.shape[2] // size)
    cache = key.new_zeros(count, size, heads, 2 * dim).transpose(1, 2)
    table = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(key.device)
    rows = key.new_zeros(heads, count * size, 2 * dim)
    rows[:, :length] = torch.cat([key, value], dim=3)[0]
    cache[table] = rows.unflatten(1, (count, size)).transpose(0, 1)
    return cache, table.int()


def _prefill(
    q: Tensor, pages: tuple[Tensor, Tensor], table: Tensor, config: PrefillConfig, step: int
) -> Tensor:
    out, state = torch.empty_like(q), (None, None, None)
    for begin in range(0, q.shape[2], step):
        end = min(begin + step, q.shape[2])
        rows, options = slice(begin, end), (*NO_RECALL, 1, config.to_string(), 1)
        written = torch.ops.h2o_prefill.paged_sparse_attention_(
            q[:, :, rows], *pages, table, end, out[:, :, rows], *state, *options
        )
        state = tuple(x[0] for x in written) if len(written[0]) else state
    return out


def _check(call: Call, qkv: tuple[Tensor, Tensor, Tensor], config: PrefillConfig) -> None:
    """Raise ValueError if a call gives other bits than one of the prompt; RuntimeError if it waits.

    Dense attention of chunks may have other bits.
    """
    out = call()  # What is set up once may wait.
    if out.is_cuda:
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    if config.exact:
        return
    expected, *_ = ops.chunked_sparse_attention(*qkv, None, None, *NO_RECALL, 0, config)
    if not out.equal(expected):
        raise ValueError(f"the layer over pages gives other bits with {config.to_string()}")


def _gather(cache: Tensor, table: Tensor, length: int, step: int) -> Tensor:
    for end in range(step, length + step, step):
        count = -(-min(end, length) // cache.shape[2])
        rows = cache.index_select(0, table[:count])
    return rows


def _flash_attention_3(folder: Path) -> Any:
    """Return the function of vLLM's wheel, without vLLM, which the folder's __init__ would need."""
    package = types.ModuleType(folder.name)
    package.__path__ = [str(folder)]
    sys.modules[folder.name] = package
    return importlib.import_module(f"{folder.name}.flash_attn_interface").flash_attn_varlen_func


def _flash(
    attend: Any, q: Tensor, pages: tuple[Tensor, Tensor], table: Tensor, step: int
) -> Tensor:
    out, (key, value) = torch.empty_like(q[0].transpose(0, 1)), (x.transpose(1, 2) for x in pages)
    for begin in range(0, len(out), step):
        rows = slice(begin, min(begin + step, len(out)))
        bounds = torch.tensor([0, rows.stop - begin, rows.stop], dtype=torch.int32)
        bounds = bounds.to(q.device, non_blocking=True)
        attend(
            q=q[0].transpose(0, 1)[rows],
            k=key,
            v=value,
            max_seqlen_q=rows.stop - begin,
            cu_seqlens_q=bounds[:2],
            max_seqlen_k=rows.stop,
            seqused_k=bounds[2:],
            causal=True,
            block_table=table[None],
            out=out[rows],
            fa_version=3,
        )
    return out


if __name__ == "__main__":
    app()
