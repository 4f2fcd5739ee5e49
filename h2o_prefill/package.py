"""Whole models as AOTInductor packages: their metadata, and how to run them.

`h2o-prefill export` writes packages; a C++ program can run them without Python.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.session import Session, SessionLayer, settings_fields
from h2o_prefill.state import PrefillState, estimated_kl, no_errors

# Tensors of the state of a layer.
STATE_OF_LAYER = 5

# Prefix of the keys in a package's metadata.
_PREFIX = "h2o_prefill."

_Run = Callable[[list[Tensor]], list[Tensor]]
_Loader: Any = torch._C._aoti.AOTIModelPackageLoader
_MODEL = "model"  # the name that Inductor gives the model of a package


@dataclass(frozen=True)
class PackageInfo:
    """Metadata of a package, stored in the package and in a JSON file beside it."""

    model: str  # name of the model's class
    settings: str  # for PrefillConfig.parse
    dtype: str  # of weights, keys and values: "float32", "bfloat16" or "float16"
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
    tokenizer: str = ""  # folder of the tokenizer, beside the package; empty: none

    @property
    def config(self) -> PrefillConfig:
        """The settings."""
        return PrefillConfig.parse(self.settings)

    def to_metadata(self) -> dict[str, str]:
        """Return the fields as texts, as a package stores them."""
        values = {**asdict(self), "end_ids": ",".join(map(str, self.end_ids))}
        return {_PREFIX + name: str(value) for name, value in values.items()}

    @classmethod
    def from_metadata(cls, metadata: dict[str, str]) -> PackageInfo:
        """Read what `to_metadata` returned; KeyError if a package of another kind has it."""
        values: dict[str, Any] = {
            name: metadata[_PREFIX + name] for name in cls.__dataclass_fields__
        }
        for name in ("capacity", "vocabulary", "layers", "kv_heads", "head_dim"):
            values[name] = int(values[name])
        values["end_ids"] = tuple(int(x) for x in values["end_ids"].split(",") if x)
        return cls(**values)

    def to_json(self) -> str:
        """Return the fields as indented JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"

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
        The .pt2 file.

    Attributes
    ----------
    info : PackageInfo

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If the file is not a package of this library, or is for another version of PyTorch or
        another CPU.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"package: no such file: {str(path)!r}")
        self.path = path
        self.info = read_info(path)
        # `aoti_load_package` would compile test programs to compare CPUs, which takes seconds;
        # `read_info` has compared them.
        self._run: _Run = _Loader(str(path), _MODEL, False, 1, -1).boxed_run
        self._state = self.info.new_state()

    @property
    def position(self) -> Tensor:
        """int64 [2], as `ops.prefill_attention_` takes it; the first entry is `length`.

        To undo later tokens, write a copy back into it.
        """
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
        self.position.zero_()

    def save(self, path: str | Path) -> None:
        """Write the text so far into a session file, as `ChunkedPrefillCache.save` does.

        A cache of the model that the package was exported from reads it too. Raises ValueError if
        there are no tokens, OSError if the file cannot be written.
        """
        length, begin = self.position.tolist()
        layers = []
        for key, value, scores, memory, errors in self._layers():
            held = PrefillState(scores[..., :length], memory, length, begin, errors)
            state = held if begin or bool(held.scores.any()) else None
            layers.append(SessionLayer(key[:, :, :length], value[:, :, :length], state))
        settings = settings_fields(self.info.config)
        Session(self.info.model_hash, settings, length, self.token_ids, layers).write(path)

    def load(self, path: str | Path) -> None:
        """Replace the text by that of a session file, of a package or of a cache.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If it is no session file, was cut or changed, is of another model or other settings,
            has more tokens than the package has room for, or more than one row, or lacks token ids
            or, in sliding windows, earlier tokens. The text stays as it was.
        """
        session = Session.read(path)
        try:
            begin = self._check_session(session)
        except ValueError as error:
            raise ValueError(f"session {str(path)!r} cannot be used: {error}") from error
        length = session.length
        for buffers, layer in zip(self._layers(), session.layers, strict=True):
            key, value, scores, memory, errors = buffers
            key[:, :, :length], value[:, :, :length] = layer.key, layer.value
            scores.zero_()
            memory.fill_(-1)
            errors.zero_()
            if layer.state is not None:
                scores[..., :length] = layer.state.scores
                memory.copy_(layer.state.memory)
                errors.copy_(layer.state.errors)
        assert session.token_ids is not None
        self._state[0][:, :length] = session.token_ids
        self.position.copy_(torch.tensor([length, begin]))

    def _layers(self) -> list[list[Tensor]]:
        """Return keys, values, scores, memory set and errors of each layer."""
        first = range(2, len(self._state), STATE_OF_LAYER)
        return [self._state[i : i + STATE_OF_LAYER] for i in first]

    def _check_session(self, session: Session) -> int:
        """Return where the last sparse chunk began; ValueError if a session does not fit."""
        info = self.info
        session.check_origin(info.model_hash, settings_fields(info.config))
        if session.length > info.capacity or session.token_ids is None:
            raise ValueError(
                f"it must have token ids, and <= {info.capacity} tokens, got {session.length}"
            )
        if len(session.layers) != info.layers:
            raise ValueError(f"it must have {info.layers} layers, got {len(session.layers)}")
        dtype = getattr(torch, info.dtype)
        wanted = (1, info.kv_heads, session.length, info.head_dim, dtype)
        for layer in session.layers:
            heads = info.kv_heads if layer.state is None else layer.state.scores.shape[1]
            shapes = {(*x.shape, x.dtype) for x in (layer.key, layer.value)}
            if shapes != {wanted} or heads != info.kv_heads:
                raise ValueError(f"keys and values must be {wanted}, got {shapes}, {heads} scored")
        begins = {x.state.last_chunk_begin for x in session.layers if x.state is not None}
        if len(begins) > 1:
            raise ValueError(f"last chunks of all layers must begin together, got {begins}")
        return begins.pop() if begins else 0

    def forward(self, token_ids: Tensor, rows: Tensor | None = None) -> Tensor:
        """Run the model over the next tokens of the text.

        Parameters
        ----------
        token_ids : Tensor
            int64 [1, T].
        rows : Tensor, optional
            int64 [R]: positions within the call whose logits are returned. Default: the last one.

        Returns
        -------
        Tensor
            [R, vocabulary], of the model's dtype.

        Raises
        ------
        ValueError
            If there are no tokens, a token is not in the vocabulary, or the capacity is exceeded.
        """
        self._check(token_ids)
        if rows is None:
            rows = torch.tensor([token_ids.shape[1] - 1])
        with torch.no_grad():
            (logits,) = self._run([token_ids.contiguous(), rows, *self._state])
        return logits

    def generate(
        self,
        token_ids: Tensor,
        max_new_tokens: int,
        on_token: Callable[[int], None],
        choose: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        """Generate after a prompt, int64 [1, T], until a token is one of `info.end_ids`.

        `on_token` is called with each token. `choose` gets the tokens so far, int64 [1, length],
        and the logits [1, vocabulary], and returns the next token, int64 [1]; without it, it is the
        one with the highest logit.
        """
        if token_ids.shape[1] + max_new_tokens > self.info.capacity - self.length:
            raise ValueError(
                f"prompt and new tokens must be <= {self.info.capacity - self.length}, the "
                f"capacity that the package was exported with, got {token_ids.shape[1]} + "
                f"{max_new_tokens}"
            )
        for _ in range(max_new_tokens):
            logits = self.forward(token_ids)
            chosen = logits.argmax(dim=-1) if choose is None else choose(self.token_ids, logits)
            token_ids = chosen[None]
            token = int(token_ids)
            on_token(token)
            if token in self.info.end_ids:
                break

    def _check(self, token_ids: Tensor) -> None:
        if token_ids.ndim != 2 or token_ids.dtype != torch.int64 or token_ids.shape[0] != 1:
            raise ValueError(
                f"token_ids must be int64 [1, T], got {token_ids.dtype} {list(token_ids.shape)}"
            )
        if token_ids.shape[1] == 0:
            raise ValueError("token_ids must not be empty")
        room = self.info.capacity - self.length
        if token_ids.shape[1] > room:
            raise ValueError(
                f"token_ids must be <= {room} tokens, the capacity of the package less those of "
                f"the text so far, got {token_ids.shape[1]}"
            )
        lowest, highest = token_ids.aminmax()
        if lowest < 0 or highest >= self.info.vocabulary:
            raise ValueError(
                f"token_ids must be in [0, {self.info.vocabulary}), got {int(lowest)} to "
                f"{int(highest)}"
            )


def read_info(path: Path) -> PackageInfo:
    """Read the metadata of a package without loading its code; ValueError if it cannot run here."""
    try:
        metadata = _Loader.load_metadata_from_package(str(path), _MODEL)
        info = PackageInfo.from_metadata(metadata)
    except (RuntimeError, KeyError) as error:
        raise ValueError(
            f"package must be a file that `h2o-prefill export` wrote, got {str(path)!r}"
        ) from error
    check_machine(info, metadata)
    return info


def check_machine(info: PackageInfo, metadata: Mapping[str, str]) -> None:
    """Refuse a package for another PyTorch or another CPU, whose code would crash here.

    The machine it was exported on is in `metadata`, written by PyTorch's Inductor.
    """
    written, here = (".".join(x.split(".")[:2]) for x in (info.torch, torch.__version__))
    if written != here:
        raise ValueError(
            f"package was written by torch {info.torch}, and needs torch {written}, got "
            f"{torch.__version__}: install that, or export the model again"
        )
    here_too = {
        "AVX2": torch.cpu._is_avx2_supported,
        "AVX512": torch.cpu._is_avx512_supported,
        "AVX512_VNNI": torch.cpu._is_vnni_supported,
    }
    machine = metadata.get("AOTI_MACHINE", platform.machine())
    if machine != platform.machine():
        raise ValueError(
            f"package is for {machine} machines, got a {platform.machine()}: export the model "
            "again on a machine like this one"
        )
    for feature in metadata.get("AOTI_CPU_ISA", "").split():
        if feature in here_too and not here_too[feature]():
            raise ValueError(
                f"package has code for {feature}, which this CPU does not have: export the model "
                "again on a machine like this one"
            )
