"""Tiny random models of every text-generating class of the installed transformers."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from compatibility.tiny_changes import CHANGES
from compatibility.tiny_config import ORDINARY_IDS, WIDTH, tiny_config
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto import modeling_auto

_MOST_PARAMETERS = 20_000_000
_SOURCE_TOKENS = 20
_MAPPINGS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
)


def model_classes() -> list[str]:
    """Return the names of the classes of transformers' auto mappings for text."""
    found: set[str] = set()
    for mapping in _MAPPINGS:
        for names in getattr(modeling_auto, mapping, {}).values():
            found.update((names,) if isinstance(names, str) else names)
    return sorted(found, key=str.lower)


class CannotBuild(Exception):
    """A class has no tiny model; the text says why."""


@dataclass(frozen=True)
class TinyModel:
    """A model and how to call it."""

    # In eval mode, on the CPU, float32.
    model: Any
    # The argument that takes the prompt: `input_ids`, or `decoder_input_ids`.
    prompt_name: str
    # Arguments of every call beside it.
    others: dict[str, Any]

    def __call__(self, prompt: Tensor, **kwargs: Any) -> Any:
        """Return what the model returns for a prompt, int64 [B, T]."""
        return self.model(**{self.prompt_name: prompt}, **self.others, **kwargs)


def build_tiny(name: str, **changes: Any) -> TinyModel:
    """Return the tiny random model of a class, the same weights every time."""
    try:
        kind = getattr(transformers, name)
        default = CHANGES.get(kind.config_class.__name__, {})
        config = tiny_config(kind.config_class, **{**default, **changes})
        _check_size(kind, config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model = kind(config).eval()
            return _with_arguments(model)
    except CannotBuild:
        raise
    # Any error may come from a class on a config that it was not written for.
    except Exception as error:
        text = " ".join(str(error).split())
        raise CannotBuild(f"{type(error).__name__}: {text}"[:160]) from error


def random_prompt(tokens: int, batch: int = 1, seed: int = 3) -> Tensor:
    """Return int64 [batch, tokens] without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(*ORDINARY_IDS, (batch, tokens), generator=generator)


def _check_size(kind: Any, config: Any) -> None:
    with torch.device("meta"):
        model: nn.Module = kind(config)
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    total = sum(sizes.values())
    if total > _MOST_PARAMETERS:
        largest = max(sizes, key=lambda name: sizes[name])
        raise CannotBuild(f"{total / 1e6:.0f} million parameters, most in {largest}")


def _with_arguments(model: Any) -> TinyModel:
    parameters = inspect.signature(model.forward).parameters
    if "decoder_input_ids" not in parameters:
        return TinyModel(model, "input_ids", {})
    if model.main_input_name == "input_ids":
        return TinyModel(model, "decoder_input_ids", {"input_ids": random_prompt(_SOURCE_TOKENS)})
    # What a tower for sound or pictures would give.
    encoded: Any = BaseModelOutput(last_hidden_state=torch.randn(1, _SOURCE_TOKENS, WIDTH))
    # Some models look for it without having asked whether there is one.
    encoded.attention_mask = None
    return TinyModel(model, "decoder_input_ids", {"encoder_outputs": encoded})
