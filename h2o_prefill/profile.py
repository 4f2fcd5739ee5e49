"""Profiles: settings that calibration found for an architecture, which `enable` takes by itself."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from h2o_prefill._cache import cache_dir
from h2o_prefill._library import build_info
from h2o_prefill.config import PrefillConfig, format_value
from h2o_prefill.presets import PROFILE, chosen_config, is_of_profile

# A profile beside a model.
FILE = "h2o_prefill.json"

_SHIPPED = Path(__file__).parent / "profiles"

# Fields of a config that decide its layers and heads, and how they see positions.
_ARCHITECTURE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "layer_types",
    "sliding_window",
    "rope_parameters",
)

_logger = logging.getLogger("h2o_prefill")


@dataclass(frozen=True)
class Profile:
    """Settings of a model, the file that they are from, and what tables call them."""

    config: PrefillConfig
    source: str
    name: str


def architecture_hash(model: Any) -> str:
    """Return 16 hex digits of the SHA-256 of a model's architecture, as its config describes it.

    It covers type, sizes, heads, vocabulary and RoPE parameters. A fine-tuned model has the digits
    of the model it comes from: weights, dtype, names and versions are no part of it.
    """
    # Attributes of configs whose layers differ cannot all be read.
    config = model.config.get_text_config(decoder=True).to_dict()
    values = {name: plain_value(config.get(name)) for name in _ARCHITECTURE}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def plain_value(value: Any) -> Any:
    """Return a value as JSON has it; the same number is an int in one file, a float in another."""
    if isinstance(value, dict):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return value if value is None or isinstance(value, bool) else str(value)


def build_profile(
    model: Any, config: PrefillConfig, text: str, measured: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of a profile, which is a JSON file."""
    return {
        "settings": config.to_string(),
        "architecture": architecture_hash(model),
        "version": build_info()["version"],
        "text": text,
        "measured": measured,
    }


def profile_path(model: Any) -> Path:
    """Return where a profile of a model is saved: beside it, or in the user's cache."""
    return next(_own_paths(model, architecture_hash(model)))


def _own_paths(model: Any, architecture: str) -> Iterator[Path]:
    """Yield where profiles that a user saved may be, the first to look at first."""
    folder = getattr(model.config, "_name_or_path", "")
    if folder and Path(folder).is_dir():
        yield Path(folder) / FILE
    yield cache_dir() / "profiles" / f"{architecture}.json"


def heads_by_layer(model: Any) -> list[int]:
    """Return the KV heads of each decoder layer, as a model's config has them; none if unknown."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    names = "num_hidden_layers", "num_key_value_heads", "num_attention_heads"
    layers, heads, query_heads = (getattr(config, name, None) for name in names)
    if not layers:
        return []
    heads = heads or query_heads or 1
    if isinstance(heads, int):
        return [heads] * (layers if isinstance(layers, int) else max(layers))
    return [number or 0 for number in heads]  # a layer without attention has none


def count_heads(model: Any) -> tuple[int, int]:
    """Return the decoder layers of a model and the most KV heads of a layer; 1 where unknown."""
    heads = heads_by_layer(model) or [1]
    return len(heads), max(heads)


def settings_of(
    model: Any, config: PrefillConfig | str | None, overrides: dict[str, Any] | None = None
) -> tuple[PrefillConfig, str]:
    """Return settings as a user passes them, and the file of the profile that they are from, or "".

    None stands for the model's profile if there is one, a text that begins with "profile" for it in
    any case. Logs once in a process that a profile was taken. Raises ValueError.
    """
    by_name = is_of_profile(config)
    profile = find_profile(model) if config is None or by_name else None
    if profile is None:
        if by_name:
            raise ValueError(
                f'the preset "{PROFILE}" must be of a model with a profile, which h2o-prefill '
                f"calibrate --save makes, got {type(model).__name__}"
            )
        return chosen_config(config, overrides), ""
    _say_once(_news(model, profile))
    chosen = profile.config
    _, changed, changes = str(config).partition(",") if by_name else ("", "", "")
    if changed:
        chosen = PrefillConfig.from_native(chosen.native.with_fields(changes))
    return chosen_config(chosen, overrides), profile.source


def settings_name(model: Any, config: PrefillConfig) -> str:
    """Return the shortest text of settings; the model's profile is like one more preset."""
    texts = [config.to_string()]
    try:
        profile = find_profile(model)
    except ValueError:  # it cannot be read, and so was not taken
        profile = None
    if profile is not None:
        values = {field.name: getattr(config, field.name) for field in fields(config)}
        known = vars(profile.config)
        changes = [f"{k}={format_value(v)}" for k, v in values.items() if v != known[k]]
        texts.append(",".join([profile.name, *changes]))
    return min(texts, key=len)


def find_profile(model: Any) -> Profile | None:
    """Return the profile beside a model, in the user's cache or of this package, in this order.

    Raises ValueError if it cannot be read or is of another architecture.
    """
    architecture = architecture_hash(model)
    own = [path for path in _own_paths(model, architecture) if path.exists()]
    for path in own or _shipped(architecture):
        name = Path(getattr(model.config, "_name_or_path", "")).name if own else path.stem
        return Profile(_read(path, architecture), str(path), f"{PROFILE} {name or path.stem}")
    return None


def _shipped(architecture: str) -> list[Path]:
    paths = sorted(_SHIPPED.glob("*.json"))
    return [path for path in paths if json.loads(path.read_text())["architecture"] == architecture]


def _read(path: Path, architecture: str) -> PrefillConfig:
    advice, values = "calibrate again, delete the file, or name a preset", {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        config, found = PrefillConfig.parse(str(values["settings"])), values["architecture"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
        version = f" of version {values['version']}" if "version" in values else ""
        raise ValueError(
            f"the profile {str(path)!r}{version} cannot be read: {why}; {advice}"
        ) from error
    if found != architecture:
        raise ValueError(
            f"the profile {str(path)!r} must be of the model's architecture, {architecture}, got "
            f"one of {found}; {advice}"
        )
    return config


def _news(model: Any, profile: Profile) -> str:
    """Return what is said of a profile that was taken: the heads with larger sets, if any."""
    wide = sum(len(x) == 3 for x in profile.config.wide)
    if not wide:
        return f"{profile.name}: {profile.config.to_string()}"
    return f"{profile.name}: {wide} of {sum(heads_by_layer(model))} KV heads keep more keys"


@functools.cache
def _say_once(text: str) -> None:
    """Log which profile was taken.

    It is news, not a warning, and Python shows nobody what is below a warning. So it goes to stderr
    as messages of transformers do, through a handler of the library's own, unless the program has
    set up logging or given this logger a level: then that decides.
    """
    if not _logger.hasHandlers() and _logger.level == logging.NOTSET:
        _logger.addHandler(logging.StreamHandler())
        _logger.setLevel(logging.INFO)
    _logger.info("h2o_prefill: %s", text)
