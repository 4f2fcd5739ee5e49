"""A model's tokenizer as `h2o_prefill::Tokenizer` reads it in C++: models of OpenVINO."""

from __future__ import annotations

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from h2o_prefill.generation.prompts import turn_text

# What Digits(individual_digits=True) and then ByteLevel() split text into: ByteLevel's own regular
# expression, but that digits stand alone and that the blanks before one stay together. OpenVINO
# lets the second look beyond the pieces of the first.
_DIGITS_THEN_BYTES = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
)

# Texts in which tokenizers differ, for a last check.
_PROBES = (
    "It's 3.14  12,345 in\n\n\n  2026\r\n\t- x=[0]*7;  # “naïve” I'LL €5",
    "  a  1   b\u00a0c ½ Ⅷ ٣ 中文。カナ 한글 हिन्दी עברית 👩‍👩‍👧 e\u0301\u200b ",
)


# What a message is to a chat template, to find the texts around it.
_MESSAGE = "<h2o_prefill message>"


def has_cpp_tokenizers() -> bool:
    """Whether `write_cpp_tokenizer` has what it needs, the package openvino-tokenizers."""
    return find_spec("openvino_tokenizers") is not None


def write_cpp_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write models that encode and decode into the folder of a package's tokenizer.

    Metadata of the first have the special tokens before a text, and what the chat template writes
    before a user's first message, before a later one, and after either. Raises NotImplementedError
    if OpenVINO has no equal of the tokenizer.
    """
    import openvino
    from openvino_tokenizers import convert_tokenizer

    options = {"with_detokenizer": True, "add_special_tokens": False}
    try:
        encoder, decoder = convert_tokenizer(_with_one_split(tokenizer), **options)
    except Exception as error:  # what it raises has no common class
        raise NotImplementedError(f"OpenVINO cannot convert the tokenizer: {error}") from error
    compiled = openvino.Core().compile_model(encoder, "CPU")
    for text in _PROBES:
        expected = tokenizer(text, add_special_tokens=False)["input_ids"]
        if compiled([text])["input_ids"][0].tolist() != expected:
            raise NotImplementedError(f"OpenVINO's tokenizer gives other ids for {text!r}")
    for name, text in _texts_around(tokenizer).items():
        encoder.set_rt_info(text, ["h2o_prefill", name])
    for model, name in ((encoder, "tokenizer"), (decoder, "detokenizer")):
        openvino.save_model(model, folder / f"openvino_{name}.xml", compress_to_fp16=False)


def _with_one_split(tokenizer: Any) -> Any:
    """Return a tokenizer of the same ids that splits text once, if it splits twice as SmolLM2's."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    steps = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [])
    if [x["type"] for x in steps] != ["Digits", "ByteLevel"] or not (
        steps[0]["individual_digits"] and steps[1]["use_regex"]
    ):
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [
            Split(Regex(_DIGITS_THEN_BYTES), behavior="isolated"),
            ByteLevel(add_prefix_space=steps[1]["add_prefix_space"], use_regex=False),
        ]
    )
    return tokenizer


def _texts_around(tokenizer: Any) -> dict[str, str]:
    whole, alone = (tokenizer("a", add_special_tokens=x)["input_ids"] for x in (True, False))
    texts = dict.fromkeys(("chat_begin", "chat_next", "chat_end"), "")
    texts["prefix"] = " ".join(map(str, whole[: len(whole) - len(alone)]))
    if tokenizer.chat_template is not None:
        message = [{"role": "user", "content": _MESSAGE}]
        first = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        texts["chat_begin"] = first.partition(_MESSAGE)[0]
        turn = turn_text(tokenizer, _MESSAGE)
        texts["chat_next"], _, texts["chat_end"] = turn.partition(_MESSAGE)
    return texts
