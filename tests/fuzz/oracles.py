"""What a valid call must give: the float64 reference of its operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o_prefill import PrefillConfig, ops
from h2o_prefill.functional import recall_settings
from h2o_prefill.reference import ops as reference
from h2o_prefill.testing import FLOAT32_TOLERANCE, widened

Config = torch.classes.h2o_prefill.PrefillConfig


def check_result(name: str, arguments: list[Any], before: list[Any], result: Any) -> None:
    """Compare the result of a valid call, and what it changed in place, with the oracle."""
    check = {
        "accumulate_scores_": _check_accumulate_scores,
        "advance_position_": _check_advance_position,
        "chunkwise_linear_attention_backward": _check_linear_backward,
        "chunked_sparse_attention": _check_sparse,
        "prefill_attention": _check_prefill,
        "prefill_attention_": _check_prefill_in_place,
        "recall_at_position": _check_recall_at_position,
    }.get(name)
    if check is not None:
        check(arguments, before, result)
        return
    expected = getattr(reference, name)(*widened(before))
    results = result if isinstance(result, tuple) else (result,)
    expecteds = expected if isinstance(expected, tuple) else (expected,)
    for actual, wanted in zip(results, expecteds, strict=True):
        _check_close(actual, wanted)


def _check_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not actual.is_floating_point():
        assert torch.equal(actual, expected.to(actual.dtype)), (actual, expected)
        return
    if not expected.numel():
        return
    magnitude = max(1.0, expected.nan_to_num(0, 0, 0).abs().max().item())
    unit = max(FLOAT32_TOLERANCE, 2.5 * torch.finfo(actual.dtype).eps)
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=0, atol=unit * magnitude, equal_nan=False
    )


def _check_accumulate_scores(arguments: list[Any], before: list[Any], result: Any) -> None:
    scores, memory, colsum = before
    present = memory >= 0
    rows = torch.zeros(*scores.shape[:2], scores.shape[2] + 1, dtype=torch.float64)
    index = torch.where(present, memory, scores.shape[2]).long()
    expected = rows.scatter_add_(2, index, colsum.double())[..., :-1] + scores
    _check_close(arguments[0], expected)


def _check_advance_position(arguments: list[Any], before: list[Any], result: Any) -> None:
    position, tokens, settings = before
    past, begin = position.tolist()
    config = Config.parse(settings)
    if config.is_sparse_call(past, tokens):
        begin = config.last_chunk_begin(past, tokens)
    assert arguments[0].tolist() == [past + tokens, begin]


def _check_recall_at_position(arguments: list[Any], before: list[Any], result: Any) -> None:
    ids, position, tokens, settings = before
    past = int(position[0])
    config = Config.parse(settings)
    if not config.recall or not config.is_sparse_call(past, tokens):
        offsets, *entries = result
        blocks = ids.shape[0] * -(-tokens // config.recall_block)
        assert offsets.tolist() == [0] * (blocks + 1)
        assert all(x.numel() == 0 for x in entries)
        return
    lookup = recall_settings(PrefillConfig.parse(settings))
    expected = reference.lexical_recall(ids[:, : past + tokens], past, *lookup)
    for actual, wanted in zip(result, expected, strict=True):
        _check_close(actual, wanted)


def _check_linear_backward(arguments: list[Any], before: list[Any], result: Any) -> None:
    wide = widened(before)
    expected = reference.chunkwise_linear_attention_backward(*wide)
    for i, (actual, wanted) in enumerate(zip(result, expected, strict=True)):
        if i == 3:  # a sum of differences, as exact as what it is made of
            terms = sum(((wide[j].abs() + 1) * expected[j].abs()).sum().item() for j in (0, 1))
            actual, wanted = actual / max(1.0, terms), wanted / max(1.0, terms)
        _check_close(actual, wanted)


def _check_sparse(arguments: list[Any], before: list[Any], result: Any) -> None:
    if before[-3] == 0:  # the scale
        return  # every key has the same score, up to rounding
    wide = widened(before)
    expected = reference.chunked_sparse_attention(*wide)
    try:
        for actual, wanted in zip(result, expected, strict=True):
            _check_close(actual, wanted)
    except AssertionError:
        if _is_stable(wide, expected):
            raise


def _is_stable(wide: list[Any], expected: tuple[Tensor, ...]) -> bool:
    """Return whether all memory sets stay the same with a rounding error in the queries.

    Where two scores are nearly the same, float32 may choose another position than the oracle.
    """
    for seed in range(3):
        noise = torch.randn(wide[0].shape, generator=torch.Generator().manual_seed(seed)) * 1e-5
        results = reference.chunked_sparse_attention(wide[0] + noise, *wide[1:])
        for actual, wanted in zip(results, expected, strict=True):
            if not torch.allclose(actual.double(), wanted.double(), rtol=0, atol=1e-3):
                return False
    return True


def _check_prefill(arguments: list[Any], before: list[Any], result: Any) -> None:
    q, k, v, scores, memory, *recall, last_chunk_begin, layer, settings = before[:-3]
    options = before[-3:]
    past = k.shape[2] - q.shape[2]
    config = Config.parse(settings)
    if q.shape[2] and config.is_sparse(layer, past, q.shape[2]):
        state = (scores, memory, *recall, last_chunk_begin)
        _check_sparse(arguments, [q, k, v, *state, config.of_layer(layer), *options], result)
        return
    _check_close(result[0], reference.dense_attention(*widened([q, k, v, *options])))
    known = min(scores.shape[2], past) if scores is not None else 0
    assert not result[1][..., known:].any()
    if known:
        assert torch.equal(result[1][..., :known], scores[..., :known])


def _check_prefill_in_place(arguments: list[Any], before: list[Any], result: Any) -> None:
    q, k, v, cache_key, cache_value, scores, memory, position, *recall, layer, text = before[:-3]
    options = before[-3:]
    past, last_chunk_begin = position.tolist()
    end = past + q.shape[2]
    keys = torch.cat([cache_key[:, :, :past], k], 2)
    values = torch.cat([cache_value[:, :, :past], v], 2)
    assert torch.equal(arguments[3][:, :, :end], keys)
    assert torch.equal(arguments[4][:, :, :end], values)
    for index in (3, 4, 5):
        assert torch.equal(arguments[index][:, :, end:], before[index][:, :, end:])
    config = Config.parse(text)
    if not q.shape[2] or not config.is_sparse(layer, past, q.shape[2]):
        _check_close(result, reference.dense_attention(*widened([q, keys, values, *options])))
        assert torch.equal(arguments[6], memory)
        assert torch.equal(arguments[5][..., :past], scores[..., :past])
        return
    state = (
        (scores[..., :past], memory, *recall, last_chunk_begin)
        if past
        else (None, None, *recall, 0)
    )
    expected = ops.prefill_attention(q, keys, values, *state, layer, text, *options)
    _check_close(result, expected[0].double())
    _check_close(arguments[5][..., :end], expected[1].double())
    width = expected[2].shape[2]
    assert torch.equal(arguments[6][..., :width], expected[2])
    assert (arguments[6][..., width:] == -1).all()
