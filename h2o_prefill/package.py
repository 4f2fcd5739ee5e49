"""Whole models as packages of compiled code and weights: their metadata, and how to run them.

`h2o-prefill export` writes packages; a C++ program can run them without Python. A package is a
folder. Its weights.pt, PyTorch's container, holds (`NAME`, `VERSION`, metadata, weights by name)
and is mapped. code-SUM.so and code-SUM.json are Inductor's, SUM is their CRC.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h2o_prefill._errors import native_errors
from h2o_prefill.config import PrefillConfig
from h2o_prefill.functional import token_rows
from h2o_prefill.state import estimated_kl, no_errors

# Tensors of the state of a layer.
STATE_OF_LAYER = 5

NAME, VERSION = "h2o_prefill.package", 1
WEIGHTS = "weights.pt"
TOKENIZER = "tokenizer"  # a folder in the package


@dataclass(frozen=True)
class PackageInfo:
    """Metadata of a package."""

    model: str  # name of the model's class
    settings: str  # for PrefillConfig.parse
    dtype: str  # of keys and values: "float32", "bfloat16" or "float16"
    capacity: int  # maximum number of tokens of prompt and answer together
    vocabulary: int
    layers: int
    kv_heads: int
    head_dim: int
    end_ids: tuple[int, ...]  # token ids that end a text
    h2o_prefill: str  # this and the next two: versions that wrote the package
    torch: str
    transformers: str
    model_hash: str  # of config and weights, which session files name
    weights: str  # their format: "float32", "bfloat16", "float16" or "int8"
    machine: str  # architecture that the code is for, as "x86_64"
    cpu_features: str  # that the code needs, separated by blanks
    weights_bytes: int = 0  # of the mapped weights, which processes share
    code: str = ""  # CRC of the code

    @property
    def config(self) -> PrefillConfig:
        """The settings."""
        return PrefillConfig.parse(self.settings)

    def resolve(self, tokens: int) -> PrefillConfig:
        """Return the settings of a prompt of so many tokens, with `min_prefill` resolved."""
        like = torch.empty(0, dtype=getattr(torch, self.dtype))
        shortest = self.config.shortest_sparse_prompt(like)
        return self.config.resolved(shortest, tokens)

    @property
    def bytes_per_token(self) -> int:
        """Memory of a session for each of its tokens: token id, keys, values and scores."""
        row = 2 * self.head_dim * getattr(torch, self.dtype).itemsize + torch.float32.itemsize
        return self.layers * self.kv_heads * row + torch.int64.itemsize

    def to_metadata(self) -> dict[str, str]:
        """Return the fields as texts, as a package stores them."""
        values = {**asdict(self), "end_ids": ",".join(map(str, self.end_ids))}
        return {name: str(value) for name, value in values.items()}

    @classmethod
    def from_metadata(cls, metadata: dict[str, str]) -> PackageInfo:
        """Read what `to_metadata` returned; KeyError if a package of another kind has it."""
        values: dict[str, Any] = {name: metadata[name] for name in cls.__dataclass_fields__}
        for name in ("capacity", "vocabulary", "layers", "kv_heads", "head_dim", "weights_bytes"):
            values[name] = int(values[name])
        values["end_ids"] = tuple(int(x) for x in values["end_ids"].split(",") if x)
        return cls(**values)

    def new_state(self) -> list[Tensor]:
        """Allocate the buffers that the graph changes in place, for the beginning of a prompt.

        They are token_ids int64 [1, capacity], position int64 [2], and for every layer keys and
        values [1, Hkv, capacity, D], scores float32 [1, Hkv, capacity], the memory set int32
        [1, Hkv, M] and the errors float32 [1, Hkv, 4].
        """
        config, dtype = self.config, getattr(torch, self.dtype)
        rows = (1, self.kv_heads, self.capacity)
        state = [
            torch.zeros(1, self.capacity, dtype=torch.int64),
            torch.zeros(2, dtype=torch.int64),
        ]
        for layer in range(self.layers):
            memory_size = config.of_layer(layer).memory_size
            key, value = (torch.zeros(*rows, self.head_dim, dtype=dtype) for _ in range(2))
            memory = torch.full((1, self.kv_heads, memory_size), -1, dtype=torch.int32)
            state += [key, value, torch.zeros(rows), memory, no_errors(key)]
        return state


class PrefillPackage:
    """An exported model, with the cache and the state of one text.

    Parameters
    ----------
    path : path
        The folder.
    checkpoints : bool
        Whether sparse calls keep what later ones need at their end, for an exact `truncate`.

    Attributes
    ----------
    info : PackageInfo

    Raises
    ------
    FileNotFoundError
        If the folder does not exist.
    ValueError
        If it is not a package of this version of the library, is damaged, or is for another version
        of PyTorch or another CPU.
    OSError
        If a file cannot be mapped, or there is no memory for keys and values.
    """

    def __init__(self, path: str | Path, checkpoints: bool = False) -> None:
        path = Path(path).expanduser()
        if not path.exists():
            raise FileNotFoundError(f"package: no such folder: {str(path)!r}")
        self.path = path
        with native_errors():
            self._session = torch.classes.h2o_prefill.PackageSession(str(path), checkpoints)
        self.info = PackageInfo.from_metadata(self._session.metadata())
        self._state = self._session.state()

    @property
    def position(self) -> Tensor:
        """int64 [2], as `ops.prefill_attention_` takes it; the first entry is `length`."""
        return self._state[1]

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return int(self.position[0])

    @property
    def estimated_kl(self) -> float:
        """Estimated KL(dense || sparse) of the text so far (`h2o_prefill.estimated_kl`)."""
        return float(estimated_kl(self._state[6::STATE_OF_LAYER], self.info.config))

    @property
    def token_ids(self) -> Tensor:
        """Ids of the text so far, int64 [1, length]."""
        return self._state[0][:, : self.length]

    def reset(self) -> None:
        """Start a new text; the contents of the buffers are ignored."""
        self._session.truncate(0)

    def truncate(self, length: int) -> None:
        """Remove the tokens after the first `length`.

        At a `checkpoint_before` the text goes on, to the bit, as one that was never longer.
        Elsewhere what removed queries added to the scores of earlier tokens stays.
        """
        with native_errors():
            self._session.truncate(length)

    def checkpoint_before(self, length: int) -> int:
        """Return the last length, up to this one, to which `truncate` is exact.

        With `checkpoints` that is the end of a sparse call (`generate` prefills a chunk in each,
        or four short ones), without only a length after the last one; 0 if there is none.
        """
        with native_errors():
            return int(self._session.checkpoint_before(length))

    def save(self, path: str | Path) -> None:
        """Write the text so far into a session file, as `ChunkedPrefillCache.save` does.

        A cache of the model that the package was exported from reads it too. Raises ValueError if
        there are no tokens, OSError if the file cannot be written.
        """
        with native_errors():
            self._session.save(os.fspath(Path(path).expanduser()))

    def load(self, path: str | Path) -> None:
        """Replace the text by a session file, written by a package or by a cache.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is no session file, is damaged, is of another model or other settings,
            has more tokens than the package has room for, or more than one row, or lacks token ids
            or, in sliding windows, earlier tokens. The text stays as it was.
        """
        with native_errors():
            self._session.load(os.fspath(Path(path).expanduser()))

    def forward(self, token_ids: Tensor | Sequence[int], rows: Tensor | None = None) -> Tensor:
        """Run the model over the next tokens of the text.

        Parameters
        ----------
        token_ids : Tensor or list
            Ints [1, T] or [T].
        rows : Tensor, optional
            int64 [R], R >= 1: positions within the call whose logits are returned. Default: the
            last one.

        Returns
        -------
        Tensor
            [R, vocabulary], of the model's dtype.

        Raises
        ------
        ValueError
            If there are no tokens, a token is not in the vocabulary, a row is not in the call, the
            capacity is exceeded, or `position` was set to what it cannot be.
        """
        ids = token_rows(token_ids)
        if rows is None:
            rows = torch.tensor([ids.shape[-1] - 1])
        with torch.no_grad():
            return self._session.forward(ids, rows)

    def generate(
        self,
        token_ids: Tensor | Sequence[int],
        max_new_tokens: int,
        on_token: Callable[[int], None] | None = None,
        *,
        sampler: Any = None,
        draft_tokens: int = 0,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[int]:
        """Continue the text by a prompt and generate an answer, as `PackageSession::generate` does.

        Parameters
        ----------
        token_ids : Tensor or list
            The prompt, ints [1, T] or [T]. It is prefilled in calls of about 1,024 tokens.
        max_new_tokens : int
            Most tokens of the answer, which ends with one of `info.end_ids` before that. The last
            one is not in the text yet.
        on_token : callable, optional
            Called with each token as it comes.
        sampler : torch.classes.h2o_prefill.Sampler, optional
            What draws the tokens. Default: the likeliest.
        draft_tokens : int
            Most tokens to draft before a call, which verifies them all: the ones that followed the
            last two or three tokens earlier in the text. The answer is the same as without drafts,
            but for logits that calls of several tokens round differently.
        on_progress : callable, optional
            Called with the number of tokens that are prefilled, and of all.

        Returns
        -------
        list of int
            The tokens of the answer.

        Raises
        ------
        ValueError
            As `forward`, or if there is no room for the new tokens.
        """
        ids = token_rows(token_ids)
        chosen_by = torch.classes.h2o_prefill.Sampler() if sampler is None else sampler
        with torch.no_grad():
            answer = self._session.answer(ids, max_new_tokens, draft_tokens, chosen_by)
            while not answer.ended():
                token = answer.step()
                if token is not None and on_token is not None:
                    on_token(token)
                elif token is None and on_progress is not None:
                    on_progress(answer.prefilled(), ids.shape[1])
        return answer.tokens()
