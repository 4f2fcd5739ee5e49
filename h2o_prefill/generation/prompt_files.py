"""Answers to the prompts of a file, as many as there are, in JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from h2o_prefill._atomic_write import replaced_file
from h2o_prefill._errors import first_line
from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation.cluster import (
    LoadedModel,
    ModelCluster,
    digest,
    model_digest,
    run_pieces,
)
from h2o_prefill.generation.json_lines import whole_lines
from h2o_prefill.generation.prompts import check_prompt, encode_prompt
from h2o_prefill.generation.runs import (
    FAILURES,
    Progress,
    check_dense,
    check_length,
    count_steps,
    end_tokens,
    eval_mode,
    generate_greedily,
    prefill_mode,
)
from h2o_prefill.generation.text import read_text

# What names a prompt: its "id", or the number of its line.
PromptId = str | int

# Least length of a row relative to the longest of its batch: the rest would be padding.
_LEAST_SHARE = 0.75


@dataclass(frozen=True)
class FileAnswers:
    """What became of the prompts of a file."""

    rows: list[dict[str, Any]]  # of all prompts, in their order
    reused: int  # answers that the file had already

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Return the rows that have an error instead of an answer."""
        return [row for row in self.rows if "error" in row]


def read_prompts(path: str | os.PathLike[str], argument: str = "input") -> dict[PromptId, str]:
    """Read JSON lines, each {"prompt": text, "id": text or int}; empty lines are left out.

    Without an "id" it is the number of the line, from 1. Other fields are ignored. Raises
    FileNotFoundError or ValueError, which name `argument` and the line.
    """
    prompts: dict[PromptId, str] = {}
    for number, line in _parsed(read_text(path, argument), argument):
        name, text = line.get("id", number), line.get("prompt")
        if not isinstance(text, str):
            raise ValueError(f'{argument} line {number} must have a text as "prompt", got {text!r}')
        if not _is_id(name):
            raise ValueError(f'{argument} line {number}: "id" must be a text or int, got {name!r}')
        if name in prompts:
            raise ValueError(f"{argument} line {number} must have an id of its own, got {name!r}")
        prompts[name] = text
    return prompts


def answer_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Mapping[PromptId, str],
    output: str | os.PathLike[str],
    config: PrefillConfig,
    *,
    max_new_tokens: int = 128,
    chat: bool = True,
    batch_tokens: int = 16384,
    cluster: ModelCluster | None = None,
    on_progress: Progress | None = None,
) -> FileAnswers:
    """Answer prompts greedily after sparse prefill, and write a JSON line for each.

    Prompts of similar lengths share a padded batch, in which each is prefilled as if it were alone;
    answers equal the ones of each prompt alone but for rounding. The lines of a batch are added to
    `output` as soon as it is done. Prompts whose answers are there already are left out: a run that
    was stopped goes on when it is called again, and only the batches in flight are lost. In the end
    the lines are put in the order of the prompts. A line is

        {"id", "answer", "prompt_tokens", "new_tokens", "finish": "stop" or "length",
         "estimated_kl": nats a token or null, "key"}

    or {"id", "error", "key"} for a prompt that is empty, too long for the model, or fails; the next
    call tries it again. The key stands for the model, the prompt and the settings.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model with dense attention.
    tokenizer
        The model's.
    prompts : mapping of str or int to str
        Texts by their ids.
    output : path
        File of JSON lines. Lines of other ids stay in it.
    config : PrefillConfig
        Settings of sparse prefill.
    max_new_tokens : int
        Tokens of an answer, at most.
    chat : bool
        Whether to put prompts into the tokenizer's chat template, if it has one.
    batch_tokens : int
        Tokens of a batch, with padding and new tokens, at most. A longer prompt is one by itself.
    cluster : ModelCluster, optional
        Workers that answer the batches, of the same model. Default: this process.
    on_progress : callable, optional
        Called with (batches done, number of batches, what runs next).

    Raises
    ------
    ValueError
        If `output` holds something else, or has an answer to another prompt, or of another model or
        other settings, under one of the ids; or if the model already runs sparsely.
    OSError
        If `output` cannot be written.
    """
    check_dense(model)
    path = Path(output).expanduser()
    settings = model_digest(model), config.to_string(), max_new_tokens
    read = {
        name: _read_prompt(model, tokenizer, text, chat, max_new_tokens)
        for name, text in prompts.items()
    }
    keys = {name: digest(settings, tokens) for name, (tokens, _) in read.items()}
    kept = _begin_output(path, keys)
    rows = dict(kept)

    def add(found: Iterable[tuple[PromptId, dict[str, Any]]]) -> None:
        new = {name: {"id": name, **row, "key": keys[name]} for name, row in found}
        rows.update(new)
        with open(path, "ab") as file:
            file.write(_lines(new.values()))

    left = {name: found for name, found in read.items() if name not in kept}
    add((name, {"error": why}) for name, (_, why) in left.items() if why)
    lengths = {name: len(tokens) for name, (tokens, why) in left.items() if not why}
    batches = dict(enumerate(_batches(lengths, max_new_tokens, batch_tokens)))
    step = count_steps(on_progress, len(batches))
    pieces = {number: [left[name][0] for name in names] for number, names in batches.items()}
    shared = config, max_new_tokens
    held = LoadedModel(model, tokenizer, step)
    for number, result in run_pieces(held, cluster, _answer_batch, shared, pieces):
        try:
            found = result()
        except FAILURES as error:
            found = [{"error": first_line(error)}] * len(batches[number])
        add(zip(batches[number], found, strict=True))
    step("done")
    ordered = {name: rows[name] for name in prompts}
    _replace(path, [*ordered.values(), *(row for name, row in rows.items() if name not in ordered)])
    return FileAnswers(list(ordered.values()), len(prompts) - len(left))


def _answer_batch(
    held: LoadedModel, shared: tuple[PrefillConfig, int], prompts: list[list[int]]
) -> list[dict[str, Any]]:
    """Answer prompts, given as token ids; if a batch fails, one by one."""
    longest = max(map(len, prompts))
    held.step(f"{len(prompts)} prompts of up to {longest} tokens")
    try:
        return _generate(held, *shared, prompts)
    except FAILURES as error:
        if len(prompts) == 1:
            return [{"error": first_line(error)}]
    # Outside of the handler, which holds on to the memory of the batch.
    alone = LoadedModel(held.network, held.tokenizer)
    return [row for one in prompts for row in _answer_batch(alone, shared, [one])]


def _generate(
    held: LoadedModel, config: PrefillConfig, max_new_tokens: int, prompts: list[list[int]]
) -> list[dict[str, Any]]:
    model, tokenizer = held.network, held.tokenizer
    length = max(map(len, prompts))
    ends = end_tokens(model)
    padding = next(iter(ends), 0)  # any token: the mask hides it
    input_ids = torch.full((len(prompts), length), padding)
    mask = torch.zeros_like(input_ids)
    for row, tokens in enumerate(prompts):
        input_ids[row, length - len(tokens) :] = torch.tensor(tokens)
        mask[row, length - len(tokens) :] = 1
    with (
        torch.no_grad(),
        eval_mode(model),
        prefill_mode(model, config, tokenizer=tokenizer) as handle,
    ):
        options = {"attention_mask": mask.to(model.device), "pad_token_id": padding}
        made: Tensor = generate_greedily(model, input_ids, max_new_tokens, **options)
        kl = handle.report().estimated_kl or [None] * len(prompts)
    rows = []
    for tokens, new, loss in zip(prompts, made[:, length:].tolist(), kl, strict=True):
        count = next((i + 1 for i, token in enumerate(new) if token in ends), len(new))
        rows.append(
            {
                "answer": tokenizer.decode(new[:count], skip_special_tokens=True),
                "prompt_tokens": len(tokens),
                "new_tokens": count,
                "finish": "stop" if new[count - 1] in ends else "length",
                "estimated_kl": None if loss is None or isnan(loss) else loss,
            }
        )
    return rows


def _read_prompt(
    model: Any, tokenizer: Any, text: str, chat: bool, max_new_tokens: int
) -> tuple[list[int], str | None]:
    """Return the token ids of a prompt, and why the model cannot answer it, if it cannot."""
    tokens: list[int] = []
    try:
        check_prompt(text)
        tokens = encode_prompt(tokenizer, text, chat=chat)[0].tolist()
        check_length(model, len(tokens) + max_new_tokens, "prompt and new tokens")
    except ValueError as error:
        return tokens, str(error)
    return tokens, None if tokens else "prompt must not be empty"


def _batches(
    lengths: Mapping[PromptId, int], max_new_tokens: int, batch_tokens: int
) -> list[list[PromptId]]:
    """Group prompts of similar lengths, the longest first: they take longest, and most memory."""
    batches: list[list[PromptId]] = []
    longest = 0
    for name in sorted(lengths, key=lambda name: -lengths[name]):
        fits = batches and (len(batches[-1]) + 1) * (longest + max_new_tokens) <= batch_tokens
        if not fits or lengths[name] < _LEAST_SHARE * longest:
            batches.append([])
            longest = lengths[name]
        batches[-1].append(name)
    return batches


def _begin_output(path: Path, keys: Mapping[PromptId, str]) -> dict[PromptId, dict[str, Any]]:
    """Return the answers that a file has, and leave nothing else in it; make it if necessary."""
    rows: dict[PromptId, dict[str, Any]] = {}
    if path.exists() and not path.is_file():
        raise ValueError(f"output must be a file that can be read again, got {str(path)!r}")
    held = path.read_bytes() if path.exists() else b""
    try:
        lines = whole_lines(held, b'{"id": ')
    except ValueError as error:
        raise ValueError(f"output must hold answers of this command alone: {error}") from None
    for number, row in _parsed(lines.decode("utf-8", "replace"), "output"):
        name = row.get("id")
        if not _is_id(name) or not {"answer", "error"} & row.keys() or "key" not in row:
            raise ValueError(
                f"output line {number} must be an answer of this command: another file?"
            )
        if "error" in row and name in keys:
            continue
        if name in keys and row["key"] != keys[name]:
            raise ValueError(
                f"output has an answer under the id {name!r} to another prompt, or of another "
                f"model or other settings: write to another file than {str(path)!r}"
            )
        rows[name] = row
    _replace(path, rows.values())
    return rows


def _parsed(text: str, argument: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the objects of JSON lines and the numbers of their lines, from 1."""
    found = []
    # Not `splitlines`: JSON may hold its other ends of lines within a text.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{argument} line {number} must be JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"{argument} line {number} must be a JSON object, got {line[:40]!r}")
        found.append((number, value))
    return found


def _is_id(value: Any) -> TypeGuard[PromptId]:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    # Halves of characters, which JSON may hold, are written as JSON escapes them.
    return text.encode("utf-8", "backslashreplace")


def _replace(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with replaced_file(path) as scratch:
        scratch.write_bytes(_lines(rows))
