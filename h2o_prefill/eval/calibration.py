"""The KV heads of a model that cause most of the error and need larger memory sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.attention_flops import (
    AttentionFlops,
    count_attention_flops,
    dense_dot_products,
    find_recalled,
    memory_dot_products,
)
from h2o_prefill.eval.perplexity import check_settings
from h2o_prefill.eval.report import write_json
from h2o_prefill.eval.windows import model_windows
from h2o_prefill.functional import RecallLists
from h2o_prefill.generation.cluster import LoadedModel, ModelCluster, run_pieces
from h2o_prefill.generation.runs import Progress, count_steps, report_progress, settings_for
from h2o_prefill.generation.text import Corpus, as_corpus
from h2o_prefill.presets import DEFAULT_PRESET
from h2o_prefill.profile import build_profile, count_heads, profile_path
from h2o_prefill.vocabulary import text_for

# Factors of every head's L and H, tried one after the other.
FACTORS = (1, 2, 4, 8)


@dataclass(frozen=True)
class HeadCalibration:
    """The error of each KV head of a model with memory sets of several sizes."""

    config: PrefillConfig  # the settings measured, with the heads found among its `wide`
    # Error of each KV head with each of `FACTORS`, by layer; `calibrate_heads` has the formula.
    errors: dict[int, list[list[float]]]
    factors: dict[int, list[int]]  # what was chosen for each KV head, by layer
    error_before: float  # sums over all heads, of the settings as given and of `config`
    error_after: float
    flops_before: AttentionFlops  # of both on the windows measured
    flops_after: AttentionFlops
    text: str  # name of the text
    context: int  # tokens of a window
    windows: list[int]

    @property
    def chosen(self) -> list[tuple[int, int, int]]:
        """Layer, KV head and factor of the heads found, the largest fall of the error first."""
        found = [
            (self.error(layer, head, factor) - self.error(layer, head, 1), layer, head, factor)
            for layer, factors in self.factors.items()
            for head, factor in enumerate(factors)
            if factor > 1
        ]
        return [(layer, head, factor) for _, layer, head, factor in sorted(found)]

    def error(self, layer: int, head: int, factor: int) -> float:
        """Return the error of a KV head with one of `FACTORS`."""
        return self.errors[layer][head][FACTORS.index(factor)]

    def save(self, model: nn.Module) -> Path:
        """Write the settings where `enable(model)` finds them without any; return the file.

        That is `h2o_prefill.json` in the folder that the model was loaded from, or else a file in
        the user's cache under the hash of the model's architecture. Raises OSError.
        """
        path = profile_path(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        names = ("error_before", "error_after", "flops_before", "flops_after", "context", "windows")
        whole = asdict(self)
        measured = {name: whole[name] for name in names}
        write_json(build_profile(model, self.config, self.text, measured), path)
        return path


def calibrate_heads(
    model: nn.Module,
    dataset: Tensor | Sequence[int] | Corpus | str,
    chunk_config: PrefillConfig | str | None = None,
    *,
    budget: float = 1.1,
    tokenizer: Any = None,
    context: int = 4096,
    windows: str = "0:1",
    cluster: ModelCluster | None = None,
    on_progress: Progress | None = None,
) -> HeadCalibration:
    """Find the KV heads whose sparse attention changes the residual stream most.

    Most of the loss of sparse prefill comes from a few heads, which retrieve distant tokens. The
    model runs once and densely over each window. In every layer but the first, whose small inputs
    inflate the error, sparse attention to the same q, k and v is computed as well, with L and H
    multiplied by each of 1, 2, 4 and 8, and compared with dense attention. With d the difference of
    the outputs of a KV head's query heads, W their part of the output projection and x the inputs
    of the decoder layer, the error of the head is

        sum over rows |W d|^2 / sum over rows |x|^2

    or sum |d|^2 / sum |dense output|^2 in layers without such a projection. The head whose larger
    memory set lowers the error most for each query-key product gets it, until the budget is spent.

    Parameters
    ----------
    dataset : Tensor, sequence of int, Corpus or str
        Tokens, or a text: another one than for the evaluation.
    chunk_config : PrefillConfig or str, optional
        Settings to widen heads of. Default: the preset "recommended", not a profile, whose heads
        are wide already. They are measured without widening at run time.
    budget : float
        Attention flops of the result relative to the settings as given, more than 1.
    model, tokenizer, context, windows, cluster, on_progress
        As in `h2o_prefill.eval`.

    Returns
    -------
    HeadCalibration
        `enable(model, calibration.config)` uses the heads found; after `calibration.save(model)`,
        so does `enable(model)`.

    Raises
    ------
    ValueError
        Also if no layer after the first is sparse.
    """
    config = settings_for(model, chunk_config or DEFAULT_PRESET)
    check_settings(config, context, windows)
    if not budget > 1:
        raise ValueError(f"budget must be more than 1, got {budget}")
    if isinstance(dataset, str):
        dataset = as_corpus(dataset, "dataset")
    selected, batches = model_windows(model, dataset, tokenizer, context, windows)
    token_text = text_for(tokenizer, config)
    total, kv_heads = count_heads(model)
    steps = len(selected) * (total if cluster is None else 1)
    held = LoadedModel(model, tokenizer, count_steps(on_progress, steps))
    pieces = dict(zip(selected, zip(selected, batches.split(1), strict=True), strict=True))
    shared = config, token_text
    results = run_pieces(held, cluster, _measure_window, shared, pieces)
    measured = {index: result() for index, result in results}
    report_progress(on_progress, steps, steps, "done")
    # In the order of the windows, whichever came first: sums are equal to the bit.
    sums = [measured[index] for index in selected]
    errors: dict[int, list[list[float]]] = {}
    for layer in sorted(sums[0]):
        error, size = (sum(column) for column in zip(*(x[layer] for x in sums), strict=True))
        errors[layer] = (error / size).T.tolist()
    if not errors:
        raise ValueError(
            f"dense_layers must leave a layer after the first sparse, got {config.dense_layers}"
        )
    before = count_attention_flops(batches, config, total, kv_heads, token_text)
    products = kv_heads * total * dense_dot_products(context) / before.ratio
    factors = _spend((budget - 1) * products, errors, config, context)
    wide = {x[:-1]: x[-1] for x in config.wide}
    for (layer, head), factor in factors.items():
        if factor > 1:
            wide[layer, head] = config.factor_of_head(head, layer) * factor
    chosen = config.replace(wide=tuple((*place, wide[place]) for place in sorted(wide)))
    return HeadCalibration(
        config=chosen,
        errors=errors,
        factors={layer: [factors[layer, x] for x in range(len(errors[layer]))] for layer in errors},
        error_before=sum(head[0] for heads in errors.values() for head in heads),
        error_after=sum(errors[x][y][FACTORS.index(factor)] for (x, y), factor in factors.items()),
        flops_before=before,
        flops_after=count_attention_flops(batches, chosen, total, kv_heads, token_text),
        text=dataset.name if isinstance(dataset, Corpus) else "tokens",
        context=context,
        windows=list(selected),
    )


# fp64, by layer: errors [FACTORS, Hkv], and what they are relative to, [1] for all heads or [Hkv].
_Sums = dict[int, tuple[Tensor, Tensor]]


def _measure_window(
    held: LoadedModel,
    settings: tuple[PrefillConfig, Tensor | None],
    window: tuple[int, Tensor],
) -> _Sums:
    """Run a window, its index and int64 [1, T], densely; return the sums of its errors."""
    from h2o_prefill.eval.observe import observe_prompt

    config, token_text = settings
    index, prompt = window
    model = held.network
    prompt = prompt.to(next(model.parameters()).device)
    lists = find_recalled(prompt, config, token_text)
    sums: _Sums = {}

    def observe(call: Any, dense: Tensor) -> None:
        layer = call.module.layer_idx
        held.step(f"window {index} layer {layer}")
        if layer > 0:
            size = residuals.get(id(call.module))
            sums[layer] = _compare(config, call, dense.transpose(1, 2), size, lists)

    with _sizes_of_residuals(model) as residuals:
        observe_prompt(model, prompt, observe, config.dense_layers)
    return sums


def _compare(
    config: PrefillConfig, call: Any, dense: Tensor, size: Tensor | None, recall: RecallLists
) -> tuple[Tensor, Tensor]:
    """Return the sums of one layer; `dense` is its output, [1, Hq, T, Dv]."""
    kv_heads, columns = call.key.shape[1], dense.shape[1] * dense.shape[3]
    # The last linear layer that takes all heads. Packed weights of quantised models do not fit.
    weights = [child.weight for child in call.module.children() if isinstance(child, nn.Linear)]
    weight = weights[-1] if weights else dense
    if size is not None and weight.shape[1:] == (columns,) and weight.is_floating_point():
        parts = weight.float().unflatten(1, (kv_heads, -1)).transpose(0, 1)
        gram = parts.transpose(1, 2) @ parts
    else:
        gram = torch.eye(columns // kv_heads, device=dense.device).expand(kv_heads, -1, -1)
        size = _squares(dense, gram)
    layer = config.of_layer(call.module.layer_idx)
    errors = []
    for factor in FACTORS:
        # Larger sets, which errors do not widen.
        local, heavy = factor * layer.local_window, factor * layer.heavy_budget
        fields = f"local_window={local},heavy_budget={heavy},error_rows=0"
        settings: str = layer.native.with_fields(fields).to_string()
        state = None, None, *recall, 0, settings  # of a prompt that begins
        given = call.query, *call.held, *state, *call.logit_options
        sparse, *_ = ops.chunked_sparse_attention(*given)
        errors.append(_squares(sparse - dense, gram))
    return torch.stack(errors).cpu(), size.reshape(-1).double().cpu()


@contextlib.contextmanager
def _sizes_of_residuals(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Yield sum |x|^2 of what enters each decoder layer, under the id of its attention module."""
    from h2o_prefill.hf.report import attention_layers

    sizes: dict[int, Tensor] = {}
    attention = {id(module) for module in attention_layers(model, None)}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering = args[0] if args else kwargs.get("hidden_states")
        if isinstance(entering, Tensor):
            size = entering.float().square().sum()
            sizes.update((id(x), size) for x in module.children() if id(x) in attention)

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if any(id(child) in attention for child in module.children()):
                hook = module.register_forward_pre_hook(note, with_kwargs=True)
                stack.callback(hook.remove)
        yield sizes


def _squares(difference: Tensor, gram: Tensor) -> Tensor:
    """Return sum |W d|^2 over the rows d of [1, Hq, T, Dv] by KV head; gram is W^T W of each."""
    groups = difference[0].float().unflatten(0, (gram.shape[0], -1))
    rows = groups.transpose(1, 2).flatten(2)
    return ((rows.transpose(1, 2) @ rows) * gram).sum((1, 2), dtype=torch.float64)


def _spend(
    budget: float, errors: dict[int, list[list[float]]], config: PrefillConfig, context: int
) -> dict[tuple[int, int], int]:
    """Choose a factor for each layer and KV head, for at most `budget` query-key products more.

    Greedily: next comes the head and factor with the largest fall of the error for each product.
    """
    budget_of_head = config.local_window + config.heavy_budget
    costs = {}
    for layer, heads in errors.items():
        for head in range(len(heads)):
            keys = config.factor_of_head(head, layer) * budget_of_head
            sizes = [config.sink_tokens + factor * keys for factor in FACTORS]
            products = [memory_dot_products(context, config.chunk_size, size) for size in sizes]
            costs[layer, head] = products
    chosen = dict.fromkeys(costs, 0)

    def steps() -> Iterator[tuple[float, int, tuple[int, int], int]]:
        for place, level in chosen.items():
            error, cost = errors[place[0]][place[1]], costs[place]
            for larger in range(level + 1, len(FACTORS)):
                added, fall = cost[larger] - cost[level], error[level] - error[larger]
                if 0 < added <= budget and fall > 0:
                    yield fall / added, added, place, larger

    while (best := max(steps(), default=None)) is not None:
        _, added, place, chosen[place] = best
        budget -= added
    return {place: FACTORS[level] for place, level in chosen.items()}
