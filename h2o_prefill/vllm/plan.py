"""What this library does of an engine's step: which rows of the batch, and in what pieces.

Nothing here knows the engine. A step has rows, the new tokens [past, total) of each request. Rows
of a prompt of at least one chunk are ours. They are cut at multiples of the chunk size, so that
results do not depend on how an engine cuts prompts into steps, as long as it cuts there too.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from h2o_prefill import ops
from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import NO_RECALL, RecallLists
from h2o_prefill.state import estimated_kl
from h2o_prefill.vllm.counters import Counters
from h2o_prefill.vllm.state import Checkpoints, PromptState

# Settings by which a request stays with the engine's own kernel, and by which nothing is lost.
DENSE, EXACT = "dense", "exact"

Pages = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Choice:
    """How a request is prefilled; `config` is None where the engine's own kernel does it."""

    config: PrefillConfig | None

    @property
    def is_sparse(self) -> bool:
        """Whether keys and values depend on the settings."""
        config = self.config
        return config is not None and config.is_sparse_call(0, config.chunk_size)

    @functools.cached_property
    def text(self) -> str:
        """What requests must have in common to share keys and values: "" if nothing is lost."""
        return self.config.to_string() if self.config is not None and self.is_sparse else ""


@functools.lru_cache(maxsize=256)
def choice_of(settings: str, chunk_size: int | None = None) -> Choice:
    """Return the choice of a settings text; sparse settings must have this chunk size.

    Raises ValueError with one line, also for settings whose effect depends on where a prompt ends:
    other prompts could not share its keys and values.
    """
    if settings == DENSE:
        return Choice(None)
    config = PrefillConfig.parse(settings)
    choice, size = Choice(config), config.chunk_size
    if isinstance(config.min_prefill, int):
        raise ValueError(f"min_prefill is not for engines, which cut prompts, got {settings!r}")
    if config.dense_tail:
        raise ValueError(f"dense_tail must be 0: prompts share beginnings, got {settings!r}")
    if choice.is_sparse and chunk_size not in (None, size):
        raise ValueError(f"chunk_size must be {chunk_size}, as of this engine, got {size}")
    return choice


def is_too_short(choice: Choice, length: int, sparse_cost: float) -> bool:
    """Return whether dense attention is faster for a prompt, at a device's cost of sparse."""
    config = choice.config
    if config is None or not choice.is_sparse or not config.is_auto:
        return False
    return length < config.shortest_at(sparse_cost)


class Rules:
    """The settings that an engine was started with, and those that its requests may ask for.

    Without `takes_dense` all rows that attend densely are the engine's.
    """

    def __init__(self, settings: str, takes_dense: bool = True) -> None:
        self.default, self.takes_dense = choice_of(settings), takes_dense
        config = self.default.config
        self.chunk_size = PrefillConfig().chunk_size if config is None else config.chunk_size

    @functools.cached_property
    def exact(self) -> PrefillConfig:
        """The settings of our rows that attend densely, which may be cut at chunks."""
        return PrefillConfig.parse(f"{EXACT},chunk_size={self.chunk_size}")

    def choice(self, asked: object = None) -> Choice:
        """Return the choice of a request; ValueError with one line if there is none."""
        if asked is None:
            return self.default
        if not isinstance(asked, str):
            raise ValueError(f"settings must be a text like 'recommended', got {asked!r}")
        return choice_of(asked, self.chunk_size)

    def takes(self, choice: Choice, prompt_length: int) -> bool:
        """Return whether the rows of a prompt are ours."""
        is_ours = choice.is_sparse or (self.takes_dense and choice.config is not None)
        return is_ours and prompt_length >= self.chunk_size

    def end_of_step(self, past: int, total: int, length: int) -> int:
        """Return where a step with room for [past, total) ends: at a chunk, or with the prompt."""
        if past >= length or total >= length:
            return total
        return max(past, total // self.chunk_size * self.chunk_size)

    def end_of_hit(self, choice: Choice, past: int, length: int) -> int:
        """Return how much of a cached prefix a prompt uses: all of it, unless a state is missing.

        There are states at chunks. The rows of a prompt's last chunk need that at its begin.
        """
        size = self.chunk_size
        anywhere = not choice.is_sparse or past // size == (length - 1) // size
        return past if anywhere else past // size * size

    def cut(self, past: int, total: int, length: int) -> Iterator[tuple[int, int]]:
        """Yield the pieces of a row: the rest of a chunk, whole ones, and what follows a prompt."""
        stop, size = min(total, length), self.chunk_size
        return itertools.pairwise(sorted({past, min(-(-past // size) * size, stop), stop, total}))


@dataclass
class Prompt:
    """A request: `owner` names its adapter and salt, `images` are their places and names."""

    request: str
    tokens: Sequence[int]
    choice: Choice
    owner: str = ""
    images: Sequence[tuple[int, str]] = ()
    _keys: list[bytes] = field(default_factory=list)

    def key(self, length: int, chunk_size: int) -> bytes:
        """Return what stands for the whole chunks of the first tokens, and their settings."""
        while (end := (len(self._keys) + 1) * chunk_size) <= length:
            begin = end - chunk_size
            before = self._keys[-1] if self._keys else (self.choice.text, self.owner)
            images = [image for image in self.images if begin <= image[0] < end]
            told = repr((before, list(self.tokens[begin:end]), images)).encode()
            self._keys.append(hashlib.blake2b(told, digest_size=32).digest())
        return self._keys[length // chunk_size - 1]


@dataclass
class Piece:
    """Tokens of a row that one call attends with, from a state or, by exact settings, densely.

    Keys and values between the state and the piece were found in the cache.
    """

    begin: int
    end: int
    before: PromptState
    after: Sequence[PromptState] = ()  # at the last ends of its chunks
    recall: RecallLists = NO_RECALL


@dataclass
class Row:
    """New tokens [past, total) of the request at `index` in the batch."""

    index: int
    past: int
    total: int
    pieces: list[Piece]

    def attend(
        self, layer: int, query: Tensor, pages: Pages, page_table: Tensor, scale: float, out: Tensor
    ) -> None:
        """Attend with one layer's queries [1, Hq, T, D], keep its states, write out like query.

        `pages`, keys and values [pages, Hkv, size, D], hold the whole history as `page_table` says.
        """
        for piece in self.pieces:
            before, cached = piece.before, piece.begin - piece.before.length
            part = slice(piece.begin - self.past, piece.end - self.past)
            q, rows = query[:, :, part], out[:, :, part]
            if cached:  # Rows do not depend on others: queries of tokens in the cache may be any.
                q, rows = (pad(x, (0, 0, cached, 0)) for x in (q, rows))
            state = before.at(layer, q.device) or (None, None, None)
            options = *piece.recall, layer, before.config.to_string(), len(piece.after), scale
            states = torch.ops.h2o_prefill.paged_sparse_attention_(
                q, *pages, page_table, piece.end, rows, *state, *options
            )
            if cached:
                out[:, :, part] = rows[:, :, cached:]
            for after, *checkpoint in zip(piece.after, *states, strict=False):  # if it is sparse
                after.layers[layer] = tuple(checkpoint)


class Planner:
    """Plans the steps of an engine, and holds the states of its requests.

    Rows of at most `decoded` tokens are the engine's.
    """

    def __init__(
        self,
        rules: Rules,
        checkpoints: Checkpoints,
        counters: Counters,
        token_text: Callable[[], Tensor | None] = lambda: None,
        decoded: int = 0,
    ) -> None:
        self.rules, self.checkpoints, self.counters = rules, checkpoints, counters
        self._decoded = decoded
        self._token_text = functools.cache(token_text)
        # None: the state of a prompt whose keys and values were found was gone.
        self._states: dict[str, PromptState | None] = {}
        self._prefilled: set[str] = set()
        # Errors of prompts on their way from a device, with an event after them.
        self._measured: deque[tuple[list[Tensor], PrefillConfig, Any]] = deque()

    def __len__(self) -> int:
        return len(self._states)

    def plan(self, batch: Iterable[tuple[Prompt | None, int, int]]) -> list[Row]:
        """Return our rows of a step, in the order in which each layer must attend with them.

        The batch has the prompt, past and total of each request; None is a request that is the
        engine's. Keys and values of a prompt may be found while the step that computes them runs,
        so shorter pasts come first.
        """
        self.checkpoints.settle()
        self._count_measured()
        self.counters["checkpoint_bytes"] = self.checkpoints.nbytes
        numbered = sorted(enumerate(batch), key=lambda one: one[1][1])
        rows = (self._row(index, *one) for index, one in numbered)
        return [row for row in rows if row is not None]

    def reset(self) -> None:
        """Drop all states, as when the model's weights have changed."""
        for request in [*self._states]:
            self.forget(request)
        self.checkpoints.clear()

    def forget(self, request: str) -> None:
        """Drop the state of a request whose prompt has been prefilled, or that has ended."""
        state, ended = self._states.pop(request, None), request in self._prefilled
        self._prefilled.discard(request)
        if ended and state is not None and state.layers and state.config.error_rows:
            event = torch.get_device_module(state.errors[0].device).Event()
            errors = [x.to("cpu", non_blocking=True) for x in state.errors]
            event.record()
            self._measured.append((errors, state.config, event))
            self._count_measured()

    def is_idle(self, lengths: list[int]) -> bool:
        """Return whether a step of rows of these lengths leaves nothing to plan."""
        return not self._states and max(lengths, default=0) <= self._decoded

    def _count_measured(self) -> None:
        while self._measured and self._measured[0][2].query():
            errors, config, _ = self._measured.popleft()
            self.counters.add_prompt(float(estimated_kl(errors, config)))

    def _row(self, index: int, prompt: Prompt | None, past: int, total: int) -> Row | None:
        if prompt is None or not self.rules.takes(prompt.choice, len(prompt.tokens)):
            return None
        if past >= len(prompt.tokens):
            self.forget(prompt.request)
            return None
        if prompt.choice.is_sparse and total == len(prompt.tokens):
            self._prefilled.add(prompt.request)  # Preempted requests come again with an answer.
        if total - past <= self._decoded:
            return None
        state = self._state_at(prompt, past) if prompt.choice.is_sparse else None
        lost = state is None and prompt.choice.is_sparse
        pieces = []
        for begin, end in self.rules.cut(past, total, len(prompt.tokens)):
            if state is not None and begin < len(prompt.tokens):
                kind, piece = "sparse", self._sparse_piece(prompt, state, begin, end)
                state = piece.after[-1] if piece.after else state
            else:
                kind = "lost" if lost else "exact"
                piece = Piece(begin, end, PromptState(self.rules.exact, begin))
            self.counters[f"{kind}_tokens"] += end - begin
            pieces.append(piece)
        if prompt.choice.is_sparse:
            self._states[prompt.request] = state
        return None if lost and not self.rules.takes_dense else Row(index, past, total, pieces)

    def _sparse_piece(self, prompt: Prompt, state: PromptState, begin: int, end: int) -> Piece:
        """Return a piece that goes on from a state."""
        config, size, lists = state.config, self.rules.chunk_size, NO_RECALL
        if config.recall:
            text = self._token_text() if config.recall_characters else None
            tokens = torch.tensor([prompt.tokens[:end]])
            lists = ops.lexical_recall(tokens, state.length, config, text)
        if begin > state.length:
            return Piece(begin, end, state, recall=lists)
        aligned = state.aligned and begin % size == 0
        inside = range(begin + size, end, size) if aligned and self.checkpoints.max_bytes else ()
        after = [PromptState(config, x, aligned) for x in (*inside, end)]
        for one in after:
            if aligned and one.length % size == 0:
                self.checkpoints.put(prompt.key(one.length, size), one)
        return Piece(begin, end, state, after, lists)

    def _state_at(self, prompt: Prompt, past: int) -> PromptState | None:
        """Return the state of a prompt before a row, None if it is gone."""
        size, config = self.rules.chunk_size, prompt.choice.config
        assert config is not None
        if past == 0:
            return PromptState(config)
        if prompt.request in self._states:
            held = self._states[prompt.request]
            if held is None or held.length == past:
                return held
        found = None
        if self.rules.end_of_hit(prompt.choice, past, len(prompt.tokens)) == past:
            key = prompt.key(past, size) if past >= size else None
            found = self.checkpoints.find(key) if key else PromptState(config)
        self.counters["state_misses" if found is None else "state_hits"] += 1
        return found
