"""What a context must give: the same prompt by the operators that return state."""

from typing import Any

import torch
from random_calls.judge import Judge
from random_calls.oracles import check_result
from torch import Tensor

from h2o_prefill import PrefillConfig, ops
from h2o_prefill.functional import NO_RECALL, RecallLists, sparse_attention
from h2o_prefill.state import LayerState

# The oracle loops over candidates and recalled keys in Python.
ORACLE_LENGTH = 160
ORACLE_CHUNKS = 24


class Twin:
    """Follows the steps of a `PrefillContext`, and compares it with what they must give."""

    def __init__(self, judge: Judge, num_layers: int, max_tokens: int, native: Any) -> None:
        self.judge, self.layers = judge, num_layers
        self.config = PrefillConfig.parse(native.to_string())
        # Tokens before a call, and with it.
        self.past, self.end = 0, 0
        self.ids = torch.zeros(0, 0, dtype=torch.int64)
        self.states: dict[int, Any] = {}  # `LayerState`
        self.cached: dict[int, list[Tensor]] = {}

    def follow(self, method: str, arguments: list[Any], result: Any, context: Any) -> None:
        """Make a step that the context has made."""
        if method == "attend":
            # With an open min_prefill resolved.
            self.config = PrefillConfig.from_native(context.config())
            self._attend(result, *arguments)
            return
        # All layers have attended.
        self.past = self.end
        if method == "begin":
            (ids,) = arguments
            known = self.ids if self.ids.numel() else ids[:, :0]
            self.ids = torch.cat([known[:, : self.past], ids], 1)
            self.end = self.ids.shape[1]
            return
        if method in ("truncate", "reset"):
            self.past = self.end = min(self.end, *arguments or [0])
            for state in self.states.values():
                state.truncate(self.end)
        self.check(method, context)

    def check(self, what: str, context: Any) -> None:
        """Compare all that the context holds."""
        judge, tracker, cache = self.judge, context.tracker(), context.cache()
        judge.true(f"length after {what}", context.length() == self.end)
        ids = self.ids[:, : self.end] if self.end else None
        judge.same(f"ids after {what}", context.token_ids(), ids)
        for layer in range(self.layers):
            if self.end > 0:
                key, value = (x[:, :, : self.end] for x in self.cached[layer])
                judge.same(f"keys after {what}", cache.key(layer), key)
                judge.same(f"values after {what}", cache.value(layer), value)
            if tracker.has_scores(layer):
                held = tracker.scores(layer), tracker.indices(layer), tracker.errors(layer)
                state = self.states[layer].clone()
                state.truncate(tracker.length(layer))
                _same_state(judge, what, (*held, tracker.last_chunk_begin(layer)), state)

    def _attend(self, out: Tensor, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: Any) -> None:
        new, what = q.shape[2], f"layer {layer}, [{self.past}, {self.end})"
        config, before = self.config.of_layer(layer), self.states.get(layer, LayerState())
        sparse = self.config.native.is_sparse(layer, self.past, new)
        lists = self._recall(self.past, self.end)
        earlier = self.cached.get(layer, [k[:, :, :0], v[:, :, :0]])
        pairs = zip(earlier, (k, v), strict=True)
        self.cached[layer] = [torch.cat([x[:, :, : self.past], y], 2) for x, y in pairs]
        history = (q, *self.cached[layer])
        state = self.states[layer] = before.clone()
        options = layer, self.config.to_string(), scale, None, 0.0, *lists
        expected = state.attend_history(*history, *options)
        self._same_rows(what, out, expected, min(config.dense_tail, new) if sparse else new)
        self.judge.near(f"dense output of {what}", out, expected)
        if not sparse:
            return

        def attend(begun: Any, begin: int, end: int) -> Any:
            rows = slice(begin - self.past, end - self.past)
            call = (q[:, :, rows], *(x[:, :, :end] for x in history[1:]))
            lists = self._recall(begin, end)
            part, after = sparse_attention(*call, begun, config, lists, scale)
            # A tail ends each call.
            self._same_rows(f"{what} again", part, expected[:, :, rows], config.dense_tail)
            return after

        self._check_again(what, attend, before, config.chunk_size, state)
        if self.end <= ORACLE_LENGTH and new <= ORACLE_CHUNKS * config.chunk_size:
            scored = [*history, before.scores, before.memory, *lists, before.last_chunk_begin]
            call = [*scored, config, scale, None, 0.0, before.errors]
            result = out, state.scores, state.memory, state.errors
            check_result(self.judge, "chunked_sparse_attention", call, call, result)

    def _check_again(
        self, what: str, attend: Any, state: Any, chunk_size: int, expected: Any
    ) -> None:
        """Make a sparse call again on other threads, and as two calls of whole chunks."""
        threads = torch.get_num_threads()
        torch.set_num_threads(3 - threads if threads < 3 else 1)
        try:
            states = [attend(state, self.past, self.end)]
        finally:
            torch.set_num_threads(threads)
        chunks = -(-(self.end - self.past) // chunk_size)
        if chunks > 1:
            middle = self.past + chunks // 2 * chunk_size
            states.append(attend(attend(state, self.past, middle), middle, self.end))
        for x in states:
            held = x.scores, x.memory, x.errors, x.last_chunk_begin
            _same_state(self.judge, f"{what} again", held, expected)

    def _recall(self, begin: int, end: int) -> RecallLists:
        """Return the keys that a call recalls."""
        if self.config.recall == 0:
            return NO_RECALL
        return ops.lexical_recall(self.ids[:, :end], begin, self.config)

    def _same_rows(self, what: str, out: Tensor, expected: Tensor, tail: int) -> None:
        """Compare the rows of a sparse call that are the same however it is made.

        Dense rows may go to PyTorch, where strides and threads change the order of additions.
        """
        self.judge.finite(f"output of {what}", out)
        rows = max(0, out.shape[2] - tail)
        self.judge.same(f"output of {what}", out[:, :, :rows], expected[:, :, :rows])


def _same_state(judge: Judge, what: str, held: tuple[Any, ...], expected: Any) -> None:
    judge.same(f"scores after {what}", held[0], expected.scores)
    judge.same(f"memory set after {what}", held[1], expected.memory)
    judge.same(f"errors after {what}", held[2], expected.errors)
    judge.true(f"last chunk after {what}", held[3] == expected.last_chunk_begin)
