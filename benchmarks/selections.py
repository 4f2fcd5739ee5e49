"""Rules of selecting keys in chunked prefill: their loss, cost, and what they see of the future.

A variant is a settings text of this library, or the name of a rule below and its size, as in
snapkv=1024 or xattention=0.9. The rules follow the papers in plain PyTorch, and attend within a
chunk as this library does; they are here for comparison, not for speed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

import torch
import typer
from common.benchmark import (
    ModelOption,
    Plan,
    TextFileOption,
    benchmark,
    dtype_name,
    load_with_text,
    new_app,
    read_corpus,
)
from common.report import Report, Row
from torch import Tensor
from torch.nn import functional

from h2o_prefill import enable
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention_flops import count_attention_flops, dense_dot_products
from h2o_prefill.eval.forward import PromptForward, PromptLogits
from h2o_prefill.eval.scores import WindowScores, perplexity, relative_difference, score_window
from h2o_prefill.generation.runs import DENSE
from h2o_prefill.generation.text import select_windows
from h2o_prefill.hf.kinds import count_heads
from h2o_prefill.vocabulary import text_for

app = new_app()

# Without "flash" or "sdpa", in which transformers reads a meaning.
NAME = "h2o_prefill_selections"

# The queries that SnapKV observes, and those that QUOKA chooses; XAttention's blocks and stride.
OBSERVED, POOLED = 64, 7
REPRESENTATIVES = 16
BLOCK, STRIDE = 128, 16

# A prompt's logits, and its query-key products a row, the selection's among them.
Run = Callable[[Tensor], tuple[PromptLogits, float]]

DEFAULT_VARIANTS = (
    *("h2o", "recommended,error_rows=0", "recommended"),
    # What H2O brings: a window alone, with recall, and with sinks as well.
    "h2o,local_window=768,heavy_budget=0",
    "recommended,error_rows=0,local_window=768,heavy_budget=0",
    "recommended,error_rows=0,local_window=764,heavy_budget=0,sink_tokens=4",
    # Others at the products of `recommended` on prose of 8,192 tokens: sinks and window, as
    # StreamingLLM, and with the last rows dense, as Tri-shape.
    "h2o,sink_tokens=4,local_window=1456,heavy_budget=0",
    "h2o,sink_tokens=128,local_window=1188,heavy_budget=0,dense_tail=128",
    *("snapkv=1204", "snapkv-own=1204", "quoka=1396", "quoka-own=1396", "xattention=0.9"),
)


def snapkv(q: Tensor, k: Tensor, begin: int, end: int, size: int, own: bool) -> tuple[Tensor, int]:
    """Return what the last queries before a chunk attend to most; `own`: its own last queries.

    After SnapKV (arXiv 2404.14469): softmax weights of the observed rows, summed and pooled along
    the keys, and the last keys before the chunk in any case. q [Hq, T, D], k [Hkv, T, D]; returns
    positions [Hkv, M] and the products of one query head.
    """
    last = end if own else begin
    first = max(0, last - OBSERVED)
    logits = q[:, first:last].unflatten(0, (len(k), -1)) @ k[:, None, :last].transpose(-1, -2)
    future = torch.arange(last) > torch.arange(first, last)[:, None]
    weights = (logits * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf).softmax(-1)
    score = weights[..., :begin].sum(dim=(1, 2))
    score = functional.max_pool1d(score, POOLED, stride=1, padding=POOLED // 2)
    score[:, -OBSERVED:] = torch.inf
    return score.topk(min(size, begin)).indices, (last - first) * last


def quoka(q: Tensor, k: Tensor, begin: int, end: int, size: int, own: bool) -> tuple[Tensor, int]:
    """Return the keys most similar to the queries that are least like their mean.

    After QUOKA (arXiv 2602.08722): cosines, the largest over the chosen queries of a head, mean
    over the heads of a group. Queries of the chunk before; `own`: of the chunk. As `snapkv`.
    """
    rows = q[:, begin:end] if own else q[:, max(0, begin - (end - begin)) : begin]
    unlike = functional.cosine_similarity(rows, rows.mean(1, keepdim=True), dim=-1)
    chosen = unlike.topk(min(REPRESENTATIVES, rows.shape[1]), largest=False).indices
    few = rows.gather(1, chosen[..., None].expand(-1, -1, q.shape[-1]))
    few = functional.normalize(few, dim=-1)
    keys = functional.normalize(k[:, None, :begin], dim=-1)
    score = (few.unflatten(0, (len(k), -1)) @ keys.transpose(-1, -2)).amax(2).mean(1)
    return score.topk(min(size, begin)).indices, few.shape[1] * begin


RULES: dict[str, Callable[..., tuple[Tensor, int]]] = {
    "snapkv": partial(snapkv, own=False),
    "snapkv-own": partial(snapkv, own=True),
    "quoka": partial(quoka, own=False),
    "quoka-own": partial(quoka, own=True),
}


def attend_by_rule(
    q: Tensor, k: Tensor, v: Tensor, rule: Callable[..., tuple[Tensor, int]], chunk: int, size: int
) -> tuple[Tensor, int]:
    """Attend to the own chunk and to the positions that a rule selects; as `attend_by_blocks`."""
    outs, products, groups = [], 0, len(q) // len(k)
    for begin in range(0, q.shape[1], chunk):
        end = min(begin + chunk, q.shape[1])
        positions = torch.empty(len(k), 0, dtype=torch.int64)
        if begin:
            positions, cost = rule(q, k, begin, end, size)
            products += cost
        own = torch.arange(begin, end).expand(len(k), -1)
        seen = torch.cat([positions, own], 1)[..., None].expand(-1, -1, k.shape[-1])
        keys, values = (x.gather(1, seen).repeat_interleave(groups, 0) for x in (k, v))
        mask = torch.ones(end - begin, seen.shape[1], dtype=torch.bool).tril(positions.shape[1])
        outs.append(functional.scaled_dot_product_attention(q[:, begin:end], keys, values, mask))
        products += int(mask.sum())
    return torch.cat(outs, 1), products


def attend_by_blocks(q: Tensor, k: Tensor, v: Tensor, threshold: float) -> tuple[Tensor, int]:
    """Attend to the blocks of keys that hold a share of the softmax over antidiagonal sums.

    After XAttention (arXiv 2503.16428): every query head's rows of a block share the blocks of
    keys, the largest first until `threshold` is reached, the first and their own in any case.
    q [Hq, T, D], k, v [Hkv, T, D]; returns the output and the products of one query head.
    """
    length, groups = q.shape[1], len(q) // len(k)
    k, v = (x.repeat_interleave(groups, 0) for x in (k, v))
    padding = (0, 0, 0, -length % BLOCK)
    lines, columns = (functional.pad(x, padding).unflatten(1, (-1, STRIDE)) for x in (q, k))
    # The antidiagonals of a square of STRIDE rows and columns, as one product of longer vectors.
    sums = lines.flip(2).flatten(2) @ columns.flatten(2).transpose(1, 2)
    later = torch.ones(sums.shape[1:], dtype=torch.bool).triu(1)
    sums = (sums * q.shape[-1] ** -0.5 / STRIDE).masked_fill(later, -torch.inf).softmax(-1)
    of_block = BLOCK // STRIDE
    share = sums.unflatten(2, (-1, of_block)).sum(-1).unflatten(1, (-1, of_block)).sum(2)
    share = share / share.sum(-1, keepdim=True)
    always = torch.eye(share.shape[1], dtype=torch.bool)
    always[:, 0] = True
    order = share.masked_fill(always, torch.inf).argsort(-1, descending=True)
    ranked = share.gather(-1, order)
    before = ranked.cumsum(-1) - ranked
    kept = torch.zeros_like(always).expand_as(share).scatter(-1, order, before < threshold)
    kept = (kept | always) & torch.ones_like(always).tril()
    outs, products = [], sums[0].numel() // 2 * len(q)
    for row in range(kept.shape[1]):
        first, end = row * BLOCK, min((row + 1) * BLOCK, length)
        mask = kept[:, row].repeat_interleave(BLOCK, -1)[:, None, :end]
        mask = mask & (torch.arange(end) <= torch.arange(first, end)[:, None])
        rows = q[:, first:end], k[:, :end], v[:, :end]
        outs.append(functional.scaled_dot_product_attention(*rows, mask))
        products += int(mask.sum())
    return torch.cat(outs, 1), products // len(q)


@contextlib.contextmanager
def attention_of(model: Any, attend: Callable[..., tuple[Tensor, int]]) -> Iterator[list[int]]:
    """Let a model attend by a function of q, k, v [H, T, D]; gives the products of each layer."""
    from transformers import AttentionInterface, AttentionMaskInterface

    products: list[int] = []

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        out, count = attend(query[0], key[0], value[0])
        products.append(count)
        return out[None].transpose(1, 2), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield products
    finally:
        model.config._attn_implementation = before


def run_of(text: str, plan: Plan, model: Any, tokenizer: Any) -> Run:
    """Return the run of a variant."""
    chunk = plan.config().chunk_size
    name, _, size = text.partition("=")
    if name in RULES:
        attend: Any = partial(attend_by_rule, rule=RULES[name], chunk=chunk, size=int(size))
    elif name == "xattention":
        attend = partial(attend_by_blocks, threshold=float(size))
    elif name == DENSE:
        return lambda ids: (PromptForward(model)(ids)[0], (ids.shape[1] + 1) / 2)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of budgets larger than a chunk
            config = PrefillConfig.parse(text)
            config = config.with_fields(**({"chunk_size": chunk} if plan.quick else {}))
        return partial(run_settings, model, tokenizer, config)

    def run(ids: Tensor) -> tuple[PromptLogits, float]:
        forward = PromptForward(model)
        with attention_of(model, attend) as products:
            logits, _ = forward(ids)
        return logits, sum(products) / len(products) / ids.shape[1]

    return run


def run_settings(
    model: Any, tokenizer: Any, config: PrefillConfig, ids: Tensor
) -> tuple[PromptLogits, float]:
    """Prefill with this library, and count what it computes."""
    with enable(model, config, tokenizer=tokenizer) as handle:
        logits, _ = PromptForward(model)(ids)
    text, errors = text_for(tokenizer, config), [handle.state.errors]
    flops = count_attention_flops(ids, config, *count_heads(model), text, errors)
    return logits, dense_dot_products(ids.shape[1]) / flops.ratio / ids.shape[1]


def leak(run: Run, ids: Tensor, chunk: int) -> float:
    """Return the largest change of a logit of rows whose future in their chunk changes.

    The tokens after a row of the last chunk, a little before its middle, become the tokens
    of the prompt's beginning.
    """
    row = ids.shape[1] - chunk // 2 - 12
    changed = ids.clone()
    changed[0, row + 1 :] = ids[0, : ids.shape[1] - row - 1]
    before, after = (run(x)[0].slice(row + 1 - chunk // 4, row + 1) for x in (ids, changed))
    return (before - after).abs().max().item()


@benchmark(app, "selections", dtype="float32", lengths=((8192,), (256,)))
def selections(
    plan: Plan,
    model: ModelOption = "smollm2-135m",
    text_file: TextFileOption = None,
    windows: Annotated[str, typer.Option(help="Windows to score, begin:end.")] = "3:4",
    variants: Annotated[
        list[str], typer.Option("--variant", help="Settings, or RULE=SIZE; repeatable.")
    ] = list(DEFAULT_VARIANTS),  # noqa: B006 (typer takes a list)
) -> None:
    """Show what rules of selection lose against dense prefill, at which cost.

    Loss, KL and most likely tokens are as in `h2o-prefill ppl`; products are query-key products
    a row, mean of layers and heads, the selection's own included; the leak is the largest
    change of a logit when only tokens after its row change, in a prompt of three chunks.
    """
    corpus, chunk = read_corpus(text_file), plan.config().chunk_size
    title = "selections of keys beside dense attention"
    with (
        torch.no_grad(),
        Report(plan, title, model=model, text=corpus.source, windows=windows) as report,
    ):
        ((dtype, network, tokenizer, tokens),) = load_with_text(plan, model, corpus, 1)
        for length in plan.lengths:
            prompts = [ids[None] for ids in select_windows(tokens, length, windows)[1]]
            dense = [run_of(DENSE, plan, network, tokenizer)(prompt)[0] for prompt in prompts]
            for variant in variants:
                run = run_of(variant, plan, network, tokenizer)
                found, products = zip(*map(run, prompts), strict=True)
                report.add(
                    variant=variant,
                    length=length,
                    dtype=dtype_name(dtype),
                    **losses(prompts, dense, found),
                    products=sum(products) / len(products),
                    leak=leak(run, prompts[0][:, : 3 * chunk], chunk),
                )


def losses(
    prompts: list[Tensor],
    dense: Sequence[PromptLogits],
    sparse: Sequence[PromptLogits],
    first: int = 0,
) -> Row:
    """Return what sparse logits lose against dense ones, in rows from `first` on."""
    windows = [
        score_window(exact, found, ids[0], range(first, ids.shape[1] - 1))
        for exact, found, ids in zip(dense, sparse, prompts, strict=True)
    ]
    scores = WindowScores(*map(torch.stack, zip(*windows, strict=True)))
    loss, error = relative_difference(scores.dense_nll, scores.sparse_nll)
    return {
        "perplexity": perplexity(scores.sparse_nll),
        "loss_percent": loss,
        "loss_error": error,
        "kl": scores.kl.mean().item(),
        "top1_percent": 100 * scores.same_top1.double().mean().item(),
    }


if __name__ == "__main__":
    app()
