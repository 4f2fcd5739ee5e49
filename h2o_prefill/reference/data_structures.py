"""Task 1 of the method: the cache, the memory sets and the chunks of one prompt.

Everything is allocated once and addressed by position. One prompt at a time: there is no batch
dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h2o_prefill.reference.memory_selection import build_memory_set
from h2o_prefill.reference.score_tracking import ScoreTracker


class ChunkManager:
    """Cut the new tokens of one call into chunks; the last may be shorter.

    The same class as `ChunkManager` of C++.

    Parameters
    ----------
    past : int
        Tokens before the call. A call always starts a new chunk, wherever the last one ended.
    num_tokens : int
        New tokens of the call.
    chunk_size : int
        S.

    Raises
    ------
    ValueError
        If S < 1, or another argument is negative.
    """

    def __init__(self, past: int, num_tokens: int, chunk_size: int) -> None:
        least = {"past": 0, "num_tokens": 0, "chunk_size": 1}
        given = {"past": past, "num_tokens": num_tokens, "chunk_size": chunk_size}
        for name, value in given.items():
            if value < least[name]:
                raise ValueError(f"{name} must be >= {least[name]}, got {value}")
        self.past = past
        self.num_tokens = num_tokens
        self.chunk_size = chunk_size

    def num_chunks(self) -> int:
        """Return the number of chunks."""
        return (self.num_tokens + self.chunk_size - 1) // self.chunk_size

    def begin(self, chunk: int) -> int:
        """Return the first position of a chunk, counted from the begin of the prompt.

        Raises
        ------
        ValueError
            If there is no such chunk.
        """
        if not 0 <= chunk < self.num_chunks():
            raise ValueError(f"chunk must be in [0, {self.num_chunks()}), got {chunk}")
        return self.past + chunk * self.chunk_size

    def end(self, chunk: int) -> int:
        """Return the position after the last one of a chunk.

        Raises
        ------
        ValueError
            If there is no such chunk.
        """
        return min(self.begin(chunk) + self.chunk_size, self.past + self.num_tokens)

    def last_chunk_begin(self) -> int:
        """Return where the last chunk begins; `past` for a call without tokens."""
        return self.begin(self.num_chunks() - 1) if self.num_tokens else self.past


class ChunkedKVCache:
    """Hold the keys and values of all layers in one buffer that never moves.

    Parameters
    ----------
    num_layers, num_heads, max_seq_len, head_dim : int
        `num_heads` counts KV heads.
    dtype, device
        Of the buffer.

    Attributes
    ----------
    buffer : Tensor
        [num_layers, 2, num_heads, max_seq_len, head_dim], keys at 0 and values at 1 of the second
        dimension.
    length : int
        Tokens that every layer holds.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        max_seq_len: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, 2, num_heads, max_seq_len, head_dim)
        self.buffer = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0

    @property
    def max_seq_len(self) -> int:
        """Positions that the buffer has room for."""
        return self.buffer.shape[3]

    def layer(self, layer_idx: int) -> Tensor:
        """Return one layer's buffer [2, num_heads, max_seq_len, head_dim], a view."""
        return self.buffer[layer_idx]

    def reset(self) -> None:
        """Forget the prompt."""
        self.buffer.zero_()
        self.length = 0


class MemorySetTracker:
    """Track the scores and the memory set of every layer and KV head over the chunks of one prompt.

    A set is built when the chunk that needs it arrives, not when the chunk before it ends: the last
    chunk of a prompt builds none, and a later call can go on, tokens decoded in between included.

    Parameters
    ----------
    num_layers, num_heads, max_seq_len : int
        `num_heads` counts KV heads.
    local_window, heavy_budget, sink_tokens : int
        L, H and K.
    dtype, device
        Of the scores.

    Attributes
    ----------
    scores : ScoreTracker
        Attention that every position received so far.
    memory : Tensor
        int32 [num_layers, num_heads, K + L + H], the set that the latest chunk attended to; -1
        where absent.
    last_chunk_begin : list of int
        Per layer, where the latest chunk began; its tokens are the next candidates.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        max_seq_len: int,
        local_window: int,
        heavy_budget: int,
        sink_tokens: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.local_window = local_window
        self.heavy_budget = heavy_budget
        self.sink_tokens = sink_tokens
        self.scores = ScoreTracker(num_layers, num_heads, max_seq_len, dtype, device)
        width = sink_tokens + local_window + heavy_budget
        self.memory = torch.full(
            (num_layers, num_heads, width), -1, dtype=torch.int32, device=device
        )
        self.last_chunk_begin = [0] * num_layers

    def begin_chunk(self, layer_idx: int, chunk_start: int) -> Tensor | None:
        """Build the memory set that the chunk at `chunk_start` attends to.

        Returns
        -------
        Tensor or None
            int32 [num_heads, K + L + H]; None for the first chunk of a prompt.
        """
        one_layer = slice(layer_idx, layer_idx + 1)
        if chunk_start > 0:
            self.memory[one_layer] = build_memory_set(
                self.memory[one_layer],
                self.last_chunk_begin[layer_idx],
                chunk_start,
                self.scores.scores[one_layer],
                self.local_window,
                self.heavy_budget,
                self.sink_tokens,
            )
        self.last_chunk_begin[layer_idx] = chunk_start
        return self.memory[layer_idx] if chunk_start > 0 else None

    def reset(self) -> None:
        """Forget the prompt."""
        self.scores.reset()
        self.memory.fill_(-1)
        self.last_chunk_begin = [0] * len(self.last_chunk_begin)
