"""`PrefillContext`: random calls, decoding, truncation, copies and errors, beside a plain twin."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from draws import Draw, draw_settings
from judge import Judge
from prompts import Prompt, before_tail, check_dense, check_tail, draw_prompts, draw_shape
from torch import Tensor

from h2o_prefill import ChunkedSparseAttention, PrefillConfig, PrefillState

classes = torch.classes.h2o_prefill

LONGEST = 2048
MOST_LAYERS = 3
MOST_STEPS = 8


@dataclass
class Twin:
    """What a context must be: histories, and each layer's state by the operator that returns it."""

    attention: ChunkedSparseAttention
    config: PrefillConfig
    # Key and value buffers of each layer, filled up to `length`.
    histories: list[tuple[Tensor, Tensor]]
    states: list[PrefillState | None]
    # int64 [B, capacity].
    token_ids: Tensor
    length: int = 0

    def attend(self, layer: int, call: tuple[Tensor, ...], scale: float | None) -> Tensor:
        """Attend with a layer's query, key and value of the tokens after `length`."""
        end = self.length + call[0].shape[2]
        for buffer, new in zip(self.histories[layer], call[1:], strict=True):
            buffer[:, :, self.length : end] = new
        recall = None
        if self.config.recall > 0:
            recall = self.attention.find_recalled(self.token_ids[:, :end], self.length)
        state = self.states[layer]
        last_chunk_begin = 0 if state is None else state.last_chunk_begin
        out, scores, memory = self.attention(
            call[0],
            *self.history(layer, end),
            None if state is None else state.scores,
            None if state is None else state.memory,
            last_chunk_begin,
            scale,
            None,
            recall,
            layer,
        )
        if self.config.native.is_sparse(layer, self.length, end - self.length):
            last_chunk_begin = self.config.last_chunk_begin(self.length, end - self.length)
        self.states[layer] = PrefillState(scores, memory, end, last_chunk_begin)
        return out

    def history(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Return a layer's first keys and values."""
        key, value = self.histories[layer]
        return key[:, :, :end], value[:, :, :end]

    def truncate(self, length: int) -> None:
        """Drop all tokens after the first `length`."""
        self.length = min(self.length, length)
        self.states = [None if x is None else x.truncated(length) for x in self.states]


class ContextPair:
    """A context and its twin, which get the same calls."""

    def __init__(
        self, draw: Draw, judge: Judge, sources: list[list[Prompt]], config: PrefillConfig
    ) -> None:
        self.draw, self.judge, self.sources, self.config = draw, judge, sources, config
        first = sources[0]
        self.capacity = first[0].length
        self.layers = len(first)
        self.context = classes.PrefillContext(self.layers, self.capacity, config.native)
        self.twin = Twin(
            ChunkedSparseAttention(config),
            config,
            [(torch.empty_like(x.key), torch.empty_like(x.value)) for x in first],
            [None] * self.layers,
            torch.empty_like(first[0].token_ids),
        )

    def call(self, tokens: int, whole: bool) -> None:
        """Make one call of all layers, and compare."""
        source = self.draw.choice(self.sources)
        begin, end = self.twin.length, self.twin.length + tokens
        ids = source[0].token_ids[:, begin:end]
        self.twin.token_ids[:, begin:end] = ids
        self.context.begin(ids)
        order = list(range(self.layers))
        wrong_at = self.draw.choice(order) if self.draw.chance(0.2) else None
        for layer in order:
            call, scale = source[layer].span(begin, end), source[layer].scale
            if layer == wrong_at:
                self._inject_inside(layer, call, scale)
            out = attend(self.context, layer, call, scale)
            what = f"context, layer {layer}, [{begin}, {end})"
            self.judge.finite(f"output of {what}", out)
            expected = self.twin.attend(layer, call, scale)
            sparse = self.config.native.is_sparse(layer, begin, tokens)
            history = (call[0], *self.twin.history(layer, end))
            if sparse:
                check_tail(self.draw, self.judge, what, out, history, scale, self.config)
                same, rows = (before_tail(x, self.config) for x in (out, expected))
                self.judge.same(f"output of {what}", same, rows)
            if whole or not sparse:
                check_dense(self.draw, self.judge, f"{what}, every key", out, history, scale)
        self.twin.length = end

    def truncate(self, length: int) -> None:
        """Drop tokens of both."""
        self.context.truncate(length)
        self.twin.truncate(length)

    def copy(self) -> None:
        """Go on with a copy of the context."""
        how = self.draw.choice(["pickle", "deepcopy", "tensors"])
        if how == "pickle":
            self.context = pickle.loads(pickle.dumps(self.context))
        elif how == "deepcopy":
            self.context = copy.deepcopy(self.context)
        else:
            self.context = classes.PrefillContext.from_tensors(self.context.state_tensors())

    def check(self, what: str) -> None:
        """Compare all that the context holds."""
        judge, twin = self.judge, self.twin
        judge.true(f"length after {what}", self.context.length() == twin.length)
        ids = self.context.token_ids()
        expected = twin.token_ids[:, : twin.length] if twin.length else None
        judge.same(f"ids after {what}", ids, expected)
        tracker, cache = self.context.tracker(), self.context.cache()
        for layer in range(self.layers):
            if twin.length > 0:
                key, value = twin.history(layer, twin.length)
                judge.same(f"keys after {what}", cache.key(layer), key)
                judge.same(f"values after {what}", cache.value(layer), value)
            if not tracker.has_scores(layer):
                continue
            state = twin.states[layer]
            length = tracker.length(layer)
            judge.same(f"scores after {what}", tracker.scores(layer), state.scores[..., :length])
            judge.same(f"memory set after {what}", tracker.indices(layer), state.memory)
            judge.true(
                f"last chunk after {what}",
                tracker.last_chunk_begin(layer) == state.last_chunk_begin,
            )

    def inject(self) -> None:
        """A wrong call between two good ones is refused and changes nothing."""
        batch = self.sources[0][0].token_ids.shape[0]
        room = self.capacity - self.twin.length
        call = self.sources[0][0].span(0, 1)
        tensors = self.context.state_tensors()
        calls: list[tuple[str, Any]] = [
            ("begin with one dimension", lambda: self.context.begin(torch.zeros(3).long())),
            ("begin with floats", lambda: self.context.begin(torch.zeros(batch, 1))),
            (
                "begin with too many tokens",
                lambda: self.context.begin(torch.zeros(batch, room + 1).long()),
            ),
            ("begin without ids, too many", lambda: self.context.begin_without_ids(room + 1)),
            ("begin with a negative number", lambda: self.context.begin_without_ids(-1)),
            ("truncate to less than nothing", lambda: self.context.truncate(-1)),
            ("a layer too many", lambda: self.context.attend(self.layers, *call)),
            ("a state cut short", lambda: classes.PrefillContext.from_tensors(tensors[:-1])),
            ("no state", lambda: classes.PrefillContext.from_tensors([])),
        ]
        if self.twin.length > 0:
            other = torch.zeros(batch + 1, 1, dtype=torch.int64)
            calls.append(("begin with another batch", lambda: self.context.begin(other)))
        what, wrong = self.draw.choice(calls)
        self.judge.refuses(what, wrong)
        self.check(what)

    def _inject_inside(self, layer: int, call: tuple[Tensor, ...], scale: float | None) -> None:
        """A wrong call in the middle of a good one is refused and leaves that as it is."""
        query, key, value = call
        longer = query.repeat(1, 1, 2, 1)
        shorter = key[:, :, 1:]
        calls: list[tuple[str, Any]] = [
            ("a layer too many", lambda: self.context.attend(self.layers, *call, scale)),
            (
                "a query too long",
                lambda: self.context.attend(layer, longer, key, value),
            ),
            ("keys in float64", lambda: self.context.attend(layer, query, key.double(), value)),
            (
                "keys of another length",
                lambda: self.context.attend(layer, query, shorter, value),
            ),
            ("values without heads", lambda: self.context.attend(layer, query, key, value[:, :0])),
        ]
        if layer > 0:
            calls.append(("a layer twice", lambda: self.context.attend(layer - 1, *call, scale)))
            calls.append(("begin inside a call", lambda: self.context.begin_without_ids(1)))
        what, wrong = self.draw.choice(calls)
        self.judge.refuses(what, wrong)


def run_context(draw: Draw, judge: Judge) -> None:
    """Run prompts through a context in random steps."""
    shape = draw_shape(draw, LONGEST)
    whole = draw.chance(0.4)
    layers = draw.integer(1, MOST_LAYERS)
    config = draw_settings(draw, shape.length, layers, whole)
    prompts = draw_prompts(draw, shape, 2 * layers)
    # Two prompts to take tokens from; the ids of the second begin elsewhere.
    other = [_with_ids(x, x.token_ids.flip(1)) for x in prompts[layers:]]
    pair = ContextPair(draw, judge, [prompts[:layers], other], config)
    _call(draw, pair, whole)
    for _ in range(draw.integer(0, MOST_STEPS)):
        _step(draw, pair, whole)
    pair.check("the last step")


def attend(context: Any, layer: int, call: tuple[Tensor, ...], scale: float | None) -> Tensor:
    """Attend with one layer of a context."""
    return context.attend(layer, *call, scale)


def _with_ids(prompt: Prompt, ids: Tensor) -> Prompt:
    return Prompt(prompt.query, prompt.key, prompt.value, ids, prompt.scale)


def _step(draw: Draw, pair: ContextPair, whole: bool) -> None:
    step = draw.choice(["call", "call", "decode", "undo", "truncate", "copy", "reset", "inject"])
    if step == "call":
        _call(draw, pair, whole)
    elif step == "decode":
        for _ in range(min(draw.integer(1, 4), pair.capacity - pair.twin.length)):
            pair.call(1, whole)
    elif step == "undo":
        _decode_and_undo(draw, pair, whole)
    elif step == "truncate":
        pair.truncate(draw.integer(0, pair.twin.length))
        pair.check("a truncation")
    elif step == "copy":
        pair.copy()
        pair.check("a copy")
    elif step == "reset":
        pair.context.reset()
        pair.twin.truncate(0)
        pair.check("a reset")
    else:
        pair.inject()


def _call(draw: Draw, pair: ContextPair, whole: bool) -> None:
    room = pair.capacity - pair.twin.length
    if room > 0:
        pair.call(draw.size(1, room), whole)


def _decode_and_undo(draw: Draw, pair: ContextPair, whole: bool) -> None:
    """Tokens that were decoded and dropped leave no trace."""
    length = pair.twin.length
    if length == 0 or length == pair.capacity:
        return
    before = pair.context.state_tensors()
    pair.call(1, whole)
    pair.truncate(length)
    pair.check("a decoded token was dropped")
    for index, (now, then) in enumerate(zip(pair.context.state_tensors(), before, strict=True)):
        # Headers hold capacities, which may have grown.
        if then.dtype != torch.int64:
            pair.judge.same(f"state tensor {index} after a decoded token was dropped", now, then)
