"""The operator `chunked_sparse_attention`: against dense attention, itself in calls, the oracle."""

from __future__ import annotations

import torch
from draws import Draw, draw_calls, draw_settings
from judge import Judge
from prompts import Prompt, before_tail, check_dense, check_tail, draw_prompts, draw_shape
from torch import Tensor

from h2o_prefill import PrefillConfig, PrefillState, ops
from h2o_prefill.functional import NO_RECALL, RecallLists, recall_lists, sparse_attention
from h2o_prefill.reference import ops as oracle

# The oracle loops over candidates and recalled keys in Python.
ORACLE_LENGTH = 160
ORACLE_CHUNKS = 24

Result = tuple[Tensor, PrefillState | None]


def run_operator(draw: Draw, judge: Judge) -> None:
    """Run one prompt through the operator, whole, again, in calls, and chunk by chunk."""
    prompt = draw_prompts(draw, draw_shape(draw), 1)[0]
    whole = draw.chance(0.4)
    config = draw_settings(draw, prompt.length, 1, whole).of_layer(0)
    # Tokens before the first call come from elsewhere, as from a call that was dense.
    begin = draw.integer(0, prompt.length - 1) if draw.chance(0.2) else 0
    out, state = _attend(prompt, config, None, begin, prompt.length)
    judge.finite("output", out)
    judge.finite("scores", state.scores)
    history = (prompt.query[:, :, begin:], prompt.key, prompt.value)
    if whole:
        check_dense(draw, judge, "operator, whole memory", out, history, prompt.scale)
    check_tail(draw, judge, "operator", out, history, prompt.scale, config)
    if draw.chance(0.3):
        _inject(draw, judge, prompt, config)
    _check_again(judge, prompt, config, begin, (out, state))
    _check_calls(draw, judge, prompt, config, begin, (out, state))
    chunks = -(-(prompt.length - begin) // config.chunk_size)
    if prompt.length <= ORACLE_LENGTH and chunks <= ORACLE_CHUNKS:
        _check_chunks(judge, prompt, config, begin, state)


def _attend(
    prompt: Prompt, config: PrefillConfig, state: PrefillState | None, begin: int, end: int
) -> tuple[Tensor, PrefillState]:
    query, key, value = prompt.query[:, :, begin:end], *prompt.span(0, end)[1:]
    recall = _recall(prompt, config, begin, end)
    return sparse_attention(query, key, value, state, config, recall, prompt.scale)


def _recall(prompt: Prompt, config: PrefillConfig, begin: int, end: int) -> RecallLists:
    if config.recall == 0:
        return NO_RECALL
    return recall_lists(prompt.token_ids[:, :end], begin, config)


def _check_again(
    judge: Judge, prompt: Prompt, config: PrefillConfig, begin: int, expected: Result
) -> None:
    """The same call gives the same, whatever the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - threads if threads < 3 else 1)
    try:
        out, state = _attend(prompt, config, None, begin, prompt.length)
    finally:
        torch.set_num_threads(threads)
    same, rows = (before_tail(x, config) for x in (out, expected[0]))
    judge.same("output of the same call on other threads", same, rows)
    _check_state(judge, "the same call on other threads", state, expected[1])


def _check_calls(
    draw: Draw, judge: Judge, prompt: Prompt, config: PrefillConfig, begin: int, expected: Result
) -> None:
    """Calls of multiples of the chunk give what one call gives, but for their dense tails."""
    state, first = None, begin
    for end in draw_calls(draw, begin, prompt.length, config.chunk_size):
        out, state = _attend(prompt, config, state, first, end)
        # A tail ends each call.
        whole = expected[0][:, :, first - begin : end - begin]
        same, rows = (before_tail(x, config) for x in (out, whole))
        judge.same(f"output of the call [{first}, {end})", same, rows)
        first = end
    _check_state(judge, "calls of multiples of the chunk", state, expected[1])


def _check_chunks(
    judge: Judge, prompt: Prompt, config: PrefillConfig, begin: int, expected: PrefillState
) -> None:
    """Every chunk is the oracle's, which begins each with our scores and so selects from the same.

    Over a whole prompt two positions of nearly the same score might change places.
    """
    state = None
    for first in range(begin, prompt.length, config.chunk_size):
        end = min(first + config.chunk_size, prompt.length)
        truth = _attend_oracle(prompt, config, state, first, end, torch.float64)
        peer = truth
        if prompt.query.dtype != torch.float32:
            peer = _attend_oracle(prompt, config, state, first, end, prompt.query.dtype)
        out, state = _attend(prompt, config, state, first, end)
        judge.close(f"chunk [{first}, {end})", out, truth[0], peer[0])
        judge.close(f"scores of chunk [{first}, {end})", state.scores, truth[1], truth[1])
        judge.same(f"memory set of chunk [{first}, {end})", state.memory, truth[2])
    _check_state(judge, "chunk by chunk", state, expected)


def _attend_oracle(
    prompt: Prompt,
    config: PrefillConfig,
    state: PrefillState | None,
    begin: int,
    end: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = prompt.query[:, :, begin:end], *prompt.span(0, end)[1:]
    scores = None if state is None else state.scores
    if scores is not None and dtype == torch.float64:
        scores = scores.double()
    return oracle.chunked_sparse_attention(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        scores,
        None if state is None else state.memory,
        *_recall(prompt, config, begin, end),
        0 if state is None else state.last_chunk_begin,
        config,
        prompt.scale,
    )


def _check_state(
    judge: Judge, what: str, state: PrefillState | None, expected: PrefillState | None
) -> None:
    judge.true(f"{what}: a state", state is not None and expected is not None)
    judge.same(f"scores of {what}", state.scores, expected.scores)
    judge.same(f"memory set of {what}", state.memory, expected.memory)
    judge.true(
        f"{what}: length and last chunk",
        (state.length, state.last_chunk_begin) == (expected.length, expected.last_chunk_begin),
    )


def _inject(draw: Draw, judge: Judge, prompt: Prompt, config: PrefillConfig) -> None:
    """A wrong argument is refused; what follows is compared with what came before."""
    q, k, v = prompt.span(0, prompt.length)
    good = {
        "q": q, "k": k, "v": v, "scores": None, "memory": None, "recall_offsets": None,
        "recall_positions": None, "recall_visible_from": None, "last_chunk_begin": 0,
        "settings": config.to_string(),
    }  # fmt: skip
    name, value = draw.choice(
        [
            ("settings", "h2o,chunk_size=0"),
            ("settings", "h2o,local_window=-1"),
            ("settings", "h2o,gqa_reduce=mean"),
            ("last_chunk_begin", 1),
            ("q", q[0]),
            ("q", q[..., :-1]),
            ("k", k.double()),
            ("v", v[:, :, :-1]),
            ("scores", torch.zeros(*k.shape[:2], k.shape[2] + 1)),
            ("memory", torch.zeros(*k.shape[:2], 3)),
            ("recall_offsets", torch.zeros(2, dtype=torch.int32)),
        ]
    )
    judge.refuses(
        f"a wrong {name}",
        lambda: ops.chunked_sparse_attention(**(good | {name: value})),
    )
