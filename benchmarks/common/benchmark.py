"""What a benchmark is run with: its options, their defaults, and the cases that they stand for."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from common.compare import Timings, compare
from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation import DTYPES, Corpus, load_model, load_text
from h2o_prefill.generation.text import encode
from h2o_prefill.presets import PRESETS, preset_config

RESULTS = Path(__file__).parents[1] / "results"
DEVICES = ("cpu", "cuda")

Row = dict[str, Any]


def gpu_timer(call: Callable[[], Any], repeats: int) -> float:
    """Return the seconds of one call between CUDA events of the current stream.

    The host hands in all calls before it waits, as a model does, so what it spends on a call counts
    where it is more than what the GPU does.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


@dataclass(frozen=True)
class Heads:
    """The attention of a model: its layers, and the heads of each."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    def attention_flops(self, dot_products: int) -> int:
        """Return the flops of attention over so many query-key pairs a head: Q K^T and P V."""
        return 4 * self.head_dim * self.query_heads * dot_products


SHAPES = {
    "smollm2": Heads("SmolLM2-135M", 30, 9, 3, 64),
    "llama3": Heads("Llama-3-8B", 32, 32, 8, 128),
    "qwen2.5": Heads("Qwen2.5-7B", 28, 28, 4, 128),
    "gemma3": Heads("Gemma-3-1B", 26, 4, 1, 256),
}


@dataclass(frozen=True)
class Case:
    """One combination of what the options list."""

    heads: Heads
    dtype: torch.dtype
    threads: int = 1
    on_gpu: bool = False

    @property
    def fields(self) -> Row:
        """What a row says of its case."""
        where = {"device": "cuda"} if self.on_gpu else {"threads": self.threads}
        heads = {"model": self.heads.name, "head_dim": self.heads.head_dim}
        return {**heads, "dtype": dtype_name(self.dtype), **where}

    def qkv(self, length: int, past: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Make random q, k, v as Hugging Face models pass them: [B, T, H, D] seen as [B, H, T, D].

        `past` tokens of the history come before the `length` queries.
        """
        device = "cuda" if self.on_gpu else "cpu"
        generator = torch.Generator(device).manual_seed(0)

        def make(heads: int, tokens: int) -> Tensor:
            shape = (1, tokens, heads, self.heads.head_dim)
            x = torch.randn(shape, generator=generator, device=device)
            return x.to(self.dtype).transpose(1, 2)

        kv_heads = self.heads.kv_heads
        keys, values = (make(kv_heads, past + length) for _ in range(2))
        return make(self.heads.query_heads, length), keys, values

    def compare(self, calls: Mapping[str, Callable[[], Any]], seconds: float) -> Timings:
        """Time calls in turns, on a GPU by its events."""
        return compare_on(self.on_gpu, calls, seconds)


def compare_on(gpu: bool, calls: Mapping[str, Callable[[], Any]], seconds: float) -> Timings:
    """Time calls in turns, on a GPU by its events."""
    return compare(calls, seconds, timer=gpu_timer if gpu else None)


@dataclass(frozen=True)
class Plan:
    """The shared options of one run, with defaults filled in."""

    name: str
    threads: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[Heads, ...]
    seconds: float
    quick: bool
    json: Path | None
    on_gpu: bool
    lengths: tuple[int, ...]
    preset: str

    def each_threads(self) -> Iterator[int]:
        """Go through the numbers of threads, with PyTorch set to each."""
        for count in self.threads:
            torch.set_num_threads(count)
            yield count

    def cases(self) -> Iterator[Case]:
        """Go through all combinations, with PyTorch set to the number of threads."""
        for heads, dtype in itertools.product(self.shapes, self.dtypes):
            for count in self.each_threads():
                yield Case(heads, dtype, count, self.on_gpu)

    def config(self, preset: str | None = None) -> PrefillConfig:
        """Return the settings of a preset, by default of --preset; small ones if quick."""
        if self.quick:
            return PrefillConfig(chunk_size=64, local_window=8, heavy_budget=8)
        return preset_config(preset or self.preset)

    def affords(self, length: int, last: tuple[int, float] | None) -> bool:
        """Say whether dense attention over so many tokens fits the time of a row.

        `last` is the previous length, and the seconds that one call of every candidate took there.
        The first call warms up, and two rounds are the fewest.
        """
        if last is None or self.quick:
            return True
        return 3 * last[1] * (length / last[0]) ** 2 <= self.seconds


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


# The options that benchmarks share, in the order of --help: type, default, help text.
_SHARED: dict[str, tuple[Any, Any, str]] = {
    "json": (Path | None, None, "The result. Default: in results/ here; none with --quick."),
    "threads": (str | None, None, "CPU threads, as 1,2. Default: 1, 2 and all cores."),
    "dtype": (str | None, None, f"Of {', '.join(DTYPES)}, with commas; else 2, on CUDA bfloat16."),
    "shape": (str, "smollm2,llama3", f"Of {', '.join(SHAPES)}, with commas."),
    "lengths": (str | None, None, "Tokens, with commas, ascending where rows are by length."),
    "preset": (str, "h2o", f"Sparse prefill settings, of {', '.join(PRESETS)}."),
    "seconds": (float, 1.0, "Time to spend on a row."),
    "quick": (bool, False, "Tiny sizes: does it run? The figures mean nothing."),
    "device": (str, "cpu", f"One of {', '.join(DEVICES)}."),
}
ModelOption = Annotated[
    str, typer.Option("--model", help="smollm2-135m, a folder, a .gguf file or a model id.")
]
LayersOption = Annotated[
    int | None, typer.Option("--layers", min=1, help="Layers of a model with random weights.")
]
TextFileOption = Annotated[
    Path | None, typer.Option("--text-file", help="Text of the prompts. Default: Python's help.")
]

# What --lengths is by default: in a full run, and in a quick one.
Lengths = tuple[tuple[int, ...], tuple[int, ...]]


def new_app() -> typer.Typer:
    """Return a command line without commands."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


def benchmark(
    app: typer.Typer, name: str, *names: str, lengths: Lengths | None = None, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function that takes a `Plan` a command, with the options that the plan is made of.

    The options are --json, --threads, --quick, those that are named here, and what the function
    takes after its plan. Expected errors are one line, and exit code 1.
    """
    asked = {"json", "threads", "quick", *names, *defaults, *(("lengths",) if lengths else ())}
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(
            option,
            keyword,
            default=defaults.get(option, default),
            annotation=Annotated[kind, typer.Option(f"--{option}", help=text)],
        )
        for option, (kind, default, text) in _SHARED.items()
        if option in asked
    ]

    def add(main: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(main, eval_str=True).parameters.values()

        @functools.wraps(main)
        def run(**values: Any) -> None:
            options = {option: values.pop(option) for option in asked}
            try:
                main(make_plan(name, lengths, **options), **values)
            except (ValueError, FileNotFoundError, ImportError) as error:
                if os.environ.get("H2O_PREFILL_DEBUG"):
                    raise
                typer.echo(f"error: {error}", err=True)
                raise typer.Exit(1) from error

        # typer reads it.
        parameters = [*(p.replace(kind=keyword) for p in own), *shared]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        app.command(name)(run)
        return main

    return add


def make_plan(name: str, default_lengths: Lengths | None = None, **given: Any) -> Plan:
    """Check the shared options that are given, and fill in defaults."""
    options = {option: default for option, (_, default, _) in _SHARED.items()} | given
    quick, device, json = options["quick"], options["device"], options["json"]
    _check_device(device)
    if json is None and not quick:
        RESULTS.mkdir(exist_ok=True)
        json = RESULTS / (f"{name}.json" if device == "cpu" else f"{name}_{device}.json")
    if json is not None and (json.suffix != ".json" or not json.absolute().parent.is_dir()):
        raise typer.BadParameter(f"--json must be a .json file in a folder, got '{json}'")
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    # The host only hands work to a GPU.
    counts = [1] if quick or device != "cpu" else sorted({1, min(2, cores), cores})
    dtypes = list(DTYPES)[:2] if device == "cpu" else ["bfloat16"]
    full, short = default_lengths or ((), ())
    return Plan(
        name=name,
        threads=parse_numbers("--threads", options["threads"], counts),
        dtypes=tuple(DTYPES[n] for n in choose("--dtype", options["dtype"], DTYPES, dtypes)),
        shapes=tuple(SHAPES[n] for n in choose("--shape", options["shape"], SHAPES, ())),
        seconds=0.02 if quick else options["seconds"],
        quick=quick,
        json=json,
        on_gpu=device != "cpu",
        lengths=parse_numbers("--lengths", options["lengths"], short if quick else full),
        preset=options["preset"],
    )


def parse_numbers(option: str, text: str | None, default: Sequence[int]) -> tuple[int, ...]:
    """Return the positive whole numbers of a comma-separated list, the default in place of None."""
    if text is None:
        return tuple(default)
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{option} must be numbers >= 1 with commas between, got {text!r}")
    return tuple(map(int, parts))


def choose(
    option: str, text: str | None, known: Collection[str], default: Collection[str]
) -> list[str]:
    """Return the names of a comma-separated list, the default in place of None."""
    names = list(default) if text is None else [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{option} must be of {', '.join(known)}, got {name!r}")
    return names


def read_corpus(text_file: Path | None) -> Corpus:
    """Return the text of --text-file, else Python's help."""
    return load_text("wikitext2" if text_file else "pydoc", text_file)


def load_with_text(
    plan: Plan, model: str, corpus: Corpus, least: int
) -> Iterator[tuple[torch.dtype, Any, Any, Tensor]]:
    """Load a model in each dtype: dtype, model, tokenizer, at least so many tokens of a text."""
    for dtype in plan.dtypes:
        network, tokenizer = load_model(model, dtype)
        tokens = encode(tokenizer, corpus.text)
        if len(tokens) < least:
            raise typer.BadParameter(
                f"--lengths must be <= the text's {len(tokens)} tokens in all, got {least}"
            )
        yield dtype, network, tokenizer, tokens


def _check_device(device: str) -> None:
    choose("--device", device, DEVICES, DEVICES)
    built = torch.ops.h2o_prefill.has_cuda()
    if device == "cuda" and not (torch.cuda.is_available() and built):
        why = "PyTorch finds no GPU" if built else "h2o_prefill was built without CUDA kernels"
        raise typer.BadParameter(f"--device cuda is not possible: {why}")
