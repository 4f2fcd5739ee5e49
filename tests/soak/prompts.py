"""Random queries, keys and values of one layer, and dense attention to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from draws import DTYPES, Draw
from judge import Judge
from torch import Tensor

from h2o_prefill import PrefillConfig
from h2o_prefill.testing import Shape, make_qkv

LONGEST = 4096
# Elements of the queries of a layer; long prompts have few heads.
MOST_ELEMENTS = 1 << 20
# Rows of a long call that are compared with dense attention.
CHECKED_ROWS = 96

HEADS = [(1, 1), (2, 2), (4, 4), (4, 2), (6, 2), (9, 3), (8, 2), (4, 1), (7, 1)]
HEAD_DIMS = [8, 16, 20, 32, 33, 64, 80, 96, 128]
LAYOUTS = ["contiguous", "transposed", "sliced", "column"]


@dataclass(frozen=True)
class Prompt:
    """Query [B, Hq, T, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv], int64 ids [B, T]."""

    query: Tensor
    key: Tensor
    value: Tensor
    token_ids: Tensor
    scale: float | None

    @property
    def length(self) -> int:
        """Tokens, T."""
        return self.query.shape[2]

    def span(self, begin: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of the tokens [begin, end)."""
        return tuple(x[:, :, begin:end] for x in (self.query, self.key, self.value))


def draw_shape(draw: Draw, longest: int = LONGEST) -> Shape:
    """Draw the sizes of a prompt."""
    length = draw.size(1, longest)
    query_heads, kv_heads = draw.choice(HEADS)
    head_dim = draw.choice(HEAD_DIMS)
    value_dim = draw.choice(HEAD_DIMS) if draw.chance(0.2) else head_dim
    batch = draw.choice([1, 1, 2, 3])
    while batch > 1 and batch * query_heads * length * head_dim > MOST_ELEMENTS:
        batch -= 1
    if query_heads * length * head_dim > MOST_ELEMENTS:
        query_heads, kv_heads = 2, 1
    return Shape(batch, query_heads, kv_heads, length, head_dim, value_dim)


def draw_prompts(draw: Draw, shape: Shape, count: int) -> list[Prompt]:
    """Draw prompts of one shape and dtype; they share token ids and scale, as layers do."""
    dtype, layout = draw.choice(DTYPES), draw.choice(LAYOUTS)
    scale = None
    if draw.chance(0.3):
        scale = draw.choice([-1, 1]) * draw.uniform(0.5, 1.5) * shape.head_dim**-0.5
    # A small vocabulary repeats itself, so that there is something to recall.
    vocabulary = draw.choice([3, 20, 200])
    ids = torch.randint(
        0, vocabulary, (shape.batch, shape.length), generator=draw.generator(), dtype=torch.int64
    )
    return [
        Prompt(*make_qkv(shape, dtype, layout=layout, seed=draw.seed()), ids, scale)
        for _ in range(count)
    ]


def check_dense(
    draw: Draw,
    judge: Judge,
    what: str,
    out: Tensor,
    history: tuple[Tensor, Tensor, Tensor],
    scale: float | None,
) -> None:
    """Check that a call attended to every key, in some of its rows."""
    query, key, value = history
    new, total = query.shape[2], key.shape[2]
    rows = torch.arange(new)
    if new > CHECKED_ROWS:
        rows = torch.randperm(new, generator=draw.generator())[:CHECKED_ROWS]
        rows[:2] = torch.tensor([0, new - 1])
    visible = torch.arange(total) <= (total - new + rows).unsqueeze(1)
    query = query[:, :, rows]
    truth = _attend(query.double(), key.double(), value.double(), visible, scale)
    peer = _attend(query, key, value, visible, scale)
    judge.close(what, out[:, :, rows], truth, peer)


def check_tail(
    draw: Draw,
    judge: Judge,
    what: str,
    out: Tensor,
    history: tuple[Tensor, Tensor, Tensor],
    scale: float | None,
    config: PrefillConfig,
) -> None:
    """Check that the dense tail of a sparse call attended to every key."""
    tail = min(config.dense_tail, out.shape[2])
    if tail:
        query, key, value = history
        history = (query[:, :, -tail:], key, value)
        check_dense(draw, judge, f"{what}, dense tail", out[:, :, -tail:], history, scale)


def before_tail(out: Tensor, config: PrefillConfig) -> Tensor:
    """Return the rows of a sparse call that are the same, bit for bit, however it is made.

    Dense rows may go to PyTorch, where strides and threads change the order of additions.
    """
    return out[:, :, : max(0, out.shape[2] - config.dense_tail)]


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None) -> Tensor:
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
