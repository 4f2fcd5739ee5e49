"""The operator `prefill_attention_`: buffers of one layer over calls, decoding, and a reset."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from draws import Draw, draw_calls, draw_settings
from judge import Judge
from prompts import Prompt, before_tail, check_dense, check_tail, draw_prompts, draw_shape
from torch import Tensor

from h2o_prefill import ChunkedSparseAttention, PrefillConfig, ops

MOST_DECODED = 4


@dataclass
class Buffers:
    """What `prefill_attention_` works on, allocated once."""

    key: Tensor
    value: Tensor
    scores: Tensor
    memory: Tensor
    position: Tensor

    @classmethod
    def for_prompt(cls, prompt: Prompt, config: PrefillConfig, spare: int) -> Buffers:
        """Return empty buffers with room for a prompt and some tokens more."""
        capacity = prompt.length + spare
        heads = prompt.key.shape[:2]
        return cls(
            prompt.key.new_empty(*heads, capacity, prompt.key.shape[3]),
            prompt.value.new_empty(*heads, capacity, prompt.value.shape[3]),
            torch.zeros(*heads, capacity),
            torch.full((*heads, config.memory_size), -1, dtype=torch.int32),
            torch.zeros(2, dtype=torch.int64),
        )

    def all(self) -> list[Tensor]:
        """Return the tensors in the order of the operator's arguments."""
        return [self.key, self.value, self.scores, self.memory, self.position]

    def clear(self) -> None:
        """Make room for another prompt; keys and values are overwritten."""
        self.scores.zero_()
        self.memory.fill_(-1)
        self.position.zero_()

    def in_use(self) -> list[Tensor]:
        """Return copies of all that a failed call may not change."""
        past = int(self.position[0])
        held = [self.key[:, :, :past], self.value[:, :, :past], *self.all()[2:]]
        return [x.clone() for x in held]


def run_in_place(draw: Draw, judge: Judge) -> None:
    """Run one or two prompts through the same buffers, beside the operator that returns state."""
    shape = draw_shape(draw)
    whole = draw.chance(0.4)
    layer = draw.integer(0, 2)
    config = draw_settings(draw, shape.length, 3, whole)
    prompts = draw_prompts(draw, shape, 2 if draw.chance(0.5) else 1)
    buffers = Buffers.for_prompt(prompts[0], config.of_layer(layer), draw.integer(0, 64))
    for prompt in prompts:
        buffers.clear()
        _run_prompt(draw, judge, prompt, config, layer, whole, buffers)


def _run_prompt(
    draw: Draw,
    judge: Judge,
    prompt: Prompt,
    config: PrefillConfig,
    layer: int,
    whole: bool,
    buffers: Buffers,
) -> None:
    attention = ChunkedSparseAttention(config)
    scores, memory, last_chunk_begin = None, None, 0
    begin = 0
    for end in _draw_ends(draw, prompt.length):
        call = prompt.span(begin, end)
        sparse = config.native.is_sparse(layer, begin, end - begin)
        recall = None
        if config.recall > 0:
            recall = attention.find_recalled(prompt.token_ids[:, :end], begin)
        if draw.chance(0.15):
            text = (layer, config.to_string())
            _inject(draw, judge, call, buffers, text, sparse)
        out = attention.attend_(
            *call, *buffers.all(), scale=prompt.scale, recall=recall, layer=layer
        )
        history = (call[0], *prompt.span(0, end)[1:])
        what = f"[{begin}, {end}){'' if sparse else ', dense'}"
        judge.finite(f"output of {what}", out)
        if whole or not sparse:
            check_dense(draw, judge, f"in place, {what}", out, history, prompt.scale)
        expected, scores, memory = attention(
            *history, scores, memory, last_chunk_begin, prompt.scale, None, recall, layer
        )
        if sparse:
            check_tail(draw, judge, f"in place, {what}", out, history, prompt.scale, config)
            same, rows = (before_tail(x, config) for x in (out, expected))
            judge.same(f"output in place of {what}", same, rows)
        judge.same(f"scores in place of {what}", buffers.scores[:, :, :end], scores)
        judge.same(f"memory set in place of {what}", buffers.memory, memory)
        if config.native.is_sparse_call(begin, end - begin):
            last_chunk_begin = config.last_chunk_begin(begin, end - begin)
        attention.advance_(buffers.position, end - begin)
        judge.true(
            f"position after {what}",
            buffers.position.tolist() == [end, last_chunk_begin],
        )
        begin = end


def _draw_ends(draw: Draw, length: int) -> list[int]:
    """Draw calls, the last of them of one token each, as decoding is."""
    decoded = min(length - 1, draw.integer(0, MOST_DECODED))
    prefilled = length - decoded
    return draw_calls(draw, 0, prefilled) + list(range(prefilled + 1, length + 1))


def _inject(
    draw: Draw,
    judge: Judge,
    call: tuple[Tensor, Tensor, Tensor],
    buffers: Buffers,
    settings: tuple[int, str],
    sparse: bool,
) -> None:
    """A wrong argument is refused and changes nothing."""
    q, k, v = call
    layer, text = settings
    good = {
        "q": q, "k": k, "v": v, "cache_key": buffers.key, "cache_value": buffers.value,
        "scores": buffers.scores, "memory": buffers.memory, "position": buffers.position,
        "recall_offsets": None, "recall_positions": None, "recall_visible_from": None,
        "layer": layer, "settings": text,
    }  # fmt: skip
    wrong = [
        ("q", q[0]),
        ("q", torch.cat([q, q[:, :, :1]], 2)),
        ("k", k.double()),
        ("v", torch.cat([v, v[:, :1]], 1)),
        ("cache_key", buffers.key[:, :, : int(buffers.position[0]) + q.shape[2] - 1]),
        ("cache_value", buffers.value.double()),
        ("position", torch.tensor([buffers.key.shape[2] + 1, 0])),
        ("position", torch.tensor([-1, 0])),
        ("position", torch.zeros(2, dtype=torch.int32)),
        ("layer", -1),
        ("settings", "no-such-preset"),
        ("settings", text + ",chunk_size=0"),
    ]
    if sparse:  # a dense call does not look at them
        wrong += [
            ("scores", buffers.scores[..., : q.shape[2] - 1]),
            ("memory", buffers.memory.long()),
            ("recall_offsets", torch.zeros(2, dtype=torch.int32)),
        ]
    name, value = draw.choice(wrong)
    before = buffers.in_use()
    judge.refuses(
        f"a wrong {name}",
        lambda: ops.prefill_attention_(**(good | {name: value})),
    )
    parts = ["keys", "values", "scores", "memory set", "position"]
    for part, now, then in zip(parts, buffers.in_use(), before, strict=True):
        judge.same(f"{part} after a wrong {name}", now, then)
