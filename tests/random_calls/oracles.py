"""What a valid call must give: the float64 reference of its operator."""

from typing import Any

import torch
from op_testing import widened
from random_calls.judge import FLOAT32_TOLERANCE, Judge
from torch import Tensor

from h2o_prefill.reference import ops as reference
from h2o_prefill.state import no_errors

Config = torch.classes.h2o_prefill.PrefillConfig
Arguments = list[Any]


def error_measures(errors: Tensor) -> tuple[Tensor, ...]:
    """Return what to compare of errors [B, Hkv, 4], float64; an error becomes a size.

    An output rounded to 16 bits has a relative error of at most one eps, the size of an error as
    well.
    """
    doublings, total, number, factors = errors.double().unbind(2)
    return doublings, (total / number.clamp(min=1)).sqrt(), number, factors


def check_result(judge: Judge, name: str, after: Arguments, before: Arguments, result: Any) -> None:
    """Compare the result of a valid call, and what it changed in place, with the oracle.

    `before` is a copy of the arguments from before the call.
    """
    check = CHECKS.get(name)
    if check is not None:
        check(judge, after, before, result)
        return
    _near(judge, result, getattr(reference, name)(*widened(before)))


def _near(judge: Judge, result: Any, expected: Any) -> None:
    results, truths = (x if isinstance(x, tuple) else (x,) for x in (result, expected))
    for index, (actual, wanted) in enumerate(zip(results, truths, strict=True)):
        judge.near(f"result {index}", actual, wanted)


def _accumulate_scores(judge: Judge, after: Arguments, before: Arguments, result: Any) -> None:
    scores, memory, colsum = before
    rows = torch.zeros(*scores.shape[:2], scores.shape[2] + 1, dtype=torch.float64)
    index = torch.where(memory >= 0, memory, scores.shape[2]).long()
    expected = rows.scatter_add_(2, index, colsum.double())[..., :-1] + scores
    judge.near("scores", after[0], expected)


def _advance_position(judge: Judge, after: Arguments, before: Arguments, result: Any) -> None:
    position, tokens, settings = before
    past, begin = position.tolist()
    config = Config.parse(settings)
    if config.is_sparse_call(past, tokens):
        begin = config.last_chunk_begin(past, tokens)
    judge.true("position", after[0].tolist() == [past + tokens, begin])


def _linear_layer(judge: Judge, after: Arguments, before: Arguments, result: Any) -> None:
    x, *weights = before
    judge.near("result", result, reference.linear(x.double(), *weights))


def _packed_embedding(judge: Judge, after: Arguments, before: Arguments, result: Any) -> None:
    judge.same("rows", result, reference.packed_embedding(*before))


def _pack_linear(judge: Judge, after: Arguments, before: Arguments, result: Any) -> None:
    for name, x, wanted in zip(
        ("packed", "scales"), result, reference.pack_linear(*before), strict=True
    ):
        judge.same(name, x, wanted)


def _recall_at_position(judge: Judge, after: Arguments, before: Arguments, result: Any) -> None:
    ids, position, tokens, settings, text = before
    past, config = int(position[0]), Config.parse(settings)
    if config.recall and config.is_sparse_call(past, tokens):
        _near(
            judge, result, reference.lexical_recall(ids[:, : past + tokens], past, settings, text)
        )
        return
    offsets, *entries = result
    blocks = ids.shape[0] * -(-tokens // config.recall_block())
    judge.true("empty offsets", offsets.tolist() == [0] * (blocks + 1))
    judge.true("no entries", all(x.numel() == 0 for x in entries))


def _linear_backward(judge: Judge, after: Arguments, before: Arguments, result: Any) -> None:
    wide = widened(before)
    results, expected = list(result), _differentiated(wide)
    # The gradient of the decay is a sum of differences, as exact as its terms.
    terms = sum(((wide[j].abs() + 1) * expected[j].abs()).sum().item() for j in (0, 1))
    for gradients in (results, expected):
        gradients[3] = gradients[3] / max(1.0, terms)
    _near(judge, tuple(results), tuple(expected))


def _differentiated(arguments: Arguments) -> list[Any]:
    """Return the gradients of the oracle by autograd, as the operator returns them."""
    tensors, gradients, settings = arguments[:6], arguments[6:9], arguments[9:]
    given = [None if x is None else x.detach().requires_grad_() for x in tensors]
    inputs = [x for x in given if x is not None]
    with torch.enable_grad():
        results = reference.chunkwise_linear_attention(*given, *settings)
    pairs = [
        (result, gradient.to(result.dtype))
        for result, gradient in zip(results, gradients, strict=True)
        if gradient is not None and result.requires_grad  # without tokens nothing may
    ]
    found = iter([torch.zeros_like(x) for x in inputs])
    if pairs:
        outputs, arriving = zip(*pairs, strict=True)
        options: Any = {"allow_unused": True, "materialize_grads": True}
        found = iter(torch.autograd.grad(outputs, inputs, arriving, **options))
    return [results[1].new_empty(0) if x is None else next(found) for x in given]


def _sparse(judge: Judge, after: Arguments, before: Arguments, result: Any) -> None:
    if before[-4] == 0:  # the scale
        return  # every key has the same score, up to rounding
    wide = widened(before)
    expected = reference.chunked_sparse_attention(*wide)
    # Where a CPU multiplies bfloat16, probabilities are rounded too, and values may cancel.
    tolerance = max(FLOAT32_TOLERANCE, 4 * torch.finfo(result[0].dtype).eps)
    sizes = tolerance * (_cancellation(wide) if result[0].dtype.itemsize == 2 else 1.0)
    tolerances = tolerance, sizes, tolerance, tolerance
    measures = (error_measures(x[3]) for x in (result, expected))
    try:
        _near(judge, result[:3], expected[:3])
        for measured, wanted, within in zip(*measures, tolerances, strict=True):
            judge.near("errors", measured, wanted, within)
    except AssertionError:
        margin = 0.05 if before[0].dtype.itemsize == 2 else 1e-3
        if judge.strict or _is_stable(wide, expected, margin):
            raise


def _cancellation(wide: Arguments) -> float:
    """Return how much larger outputs would be, at most, if values of few dims did not cancel."""
    q, k, v, options = *wide[:3], wide[10:13]
    if not q.numel() or v.shape[3] >= 8:
        return 1.0
    out, whole = (reference.dense_attention(q, k, x, *options).norm(dim=3) for x in (v, v.abs()))
    return max(1.0, float((whole / out.clamp(min=1e-30)).max()))


def _is_stable(wide: Arguments, expected: tuple[Tensor, ...], margin: float) -> bool:
    """Return whether memory sets and errors are the same with rounding errors.

    They are put in the queries, and relative to their values in the limits of errors. Where two
    scores are nearly the same, float32 may choose another position than the oracle.
    """
    q, *others, settings = wide[:10]
    config = Config.parse(settings if isinstance(settings, str) else settings.to_string())
    for seed, change in enumerate((-margin, 0.0, margin)):
        noise = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed)) * 1e-5
        threshold = config.error_threshold * (1 + change)
        changed = config.with_fields(f"error_threshold={threshold}")
        results = reference.chunked_sparse_attention(q + noise, *others, changed, *wide[10:])
        for actual, wanted in zip(results, expected, strict=True):
            if not torch.allclose(actual.double(), wanted.double(), rtol=0, atol=1e-3):
                return False
    return True


def _prefill(judge: Judge, after: Arguments, before: Arguments, result: Any) -> None:
    q, k, v, cache_key, cache_value, scores, memory, errors, position, layer, text = before[:11]
    options, recall, window = before[11:14], before[14:17], before[17]
    past, last_chunk_begin = position.tolist()
    end, config = past + q.shape[2], Config.parse(text)
    if q.shape[2] and not past and errors is not None:
        errors = torch.zeros_like(errors)
    keys, values = cache_key[:, :, :end], cache_value[:, :, :end]
    if k is not None:
        keys, values = torch.cat([keys[:, :, :past], k], 2), torch.cat([values[:, :, :past], v], 2)
    judge.same("cached keys", after[3][:, :, :end], keys)
    judge.same("cached values", after[4][:, :, :end], values)
    for index in (3, 4, 5):
        judge.same("what follows", after[index][:, :, end:], before[index][:, :, end:])
    fits = window is None or window >= end
    if not q.shape[2] or not fits or not config.is_sparse(layer, past, q.shape[2]):
        wide = widened([q, keys, values, *options])
        expected, _ = reference.sliding_window_attention(*wide[:3], window or end + 1, *wide[3:])
        judge.near("output", result, expected)
        none_yet = q.shape[2] and not past
        judge.same("memory set", after[6], torch.full_like(memory, -1) if none_yet else memory)
        judge.same("errors", after[7], errors)
        judge.same("scores", after[5][..., :past], scores[..., :past])
        return
    state = (scores[..., :past], memory) if past else (None, None)
    last_chunk_begin = last_chunk_begin if past else 0
    config = config.of_layer(layer)
    width = config.memory_size()
    arguments = [q, keys, values, *state, *recall, last_chunk_begin, config, *options, errors]
    new_errors = no_errors(keys) if after[7] is None else after[7]
    results = result, after[5][..., :end], after[6][..., :width], new_errors
    _sparse(judge, after, arguments, results)
    judge.true("-1 after the memory set", bool((after[6][..., width:] == -1).all()))


CHECKS = {
    "accumulate_scores_": _accumulate_scores,
    "advance_position_": _advance_position,
    "chunkwise_linear_attention_backward": _linear_backward,
    "chunked_sparse_attention": _sparse,
    "linear": _linear_layer,
    "pack_linear": _pack_linear,
    "packed_embedding": _packed_embedding,
    # tests/python/ops/test_paged_sparse_attention.py compares it with contiguous keys, to the bit.
    "paged_sparse_attention_": lambda *_: None,
    "prefill_attention_": _prefill,
    "recall_at_position": _recall_at_position,
}
