"""A Hugging Face model, dense, enabled and as a package: prefill and decoding."""

from __future__ import annotations

import importlib.util
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from common.benchmark import (
    LayersOption,
    ModelOption,
    Plan,
    Row,
    TextFileOption,
    benchmark,
    compare_on,
    dtype_name,
    load_with_text,
    new_app,
    read_corpus,
)
from common.compare import compare
from common.machine import keep_freed_memory
from common.report import Report, decoding_fields, rate_fields

from h2o_prefill.generation import load_model
from h2o_prefill.generation.packages import write_package
from h2o_prefill.generation.prompts import random_ids
from h2o_prefill.package import PrefillPackage

app = new_app()

STEPS = 16
MODEL = "smollm2-135m"
BOTH = {"dtype": "bfloat16,float32"}
RECOMMENDED = {"preset": "recommended"}


def _options(plan: Plan, model: str, **more: object) -> Row:
    kept = {"freed_memory_kept": keep_freed_memory()}
    return {"model": model, "preset": plan.preset, "lengths": plan.lengths, **more, **kept}


def _where(length: int, dtype: torch.dtype, threads: int) -> Row:
    return {"length": length, "dtype": dtype_name(dtype), "threads": threads}


# The functions below load transformers themselves, which --help does not need.


@benchmark(
    app, "model", "preset", "device", **BOTH, lengths=((2048, 4096, 8192), (200,)), seconds=240.0
)
def prefill(
    plan: Plan,
    model: ModelOption = MODEL,
    layers: LayersOption = None,
) -> None:
    """Time the prefill of a Hugging Face model, logits of the last token only.

    "exact" has every layer dense, by our dense kernel alone: how much of the factor is that kernel.
    "no_attention" runs everything but attention: the ceiling of what sparse attention can reach.
    Lengths go up until the next one would take longer than --seconds. --model gemma3-1b-layers,
    gpt-oss-20b-layers, qwen2.5-1.5b-layers, llama3.2-1b-layers, llama3.2-3b-layers and
    llama3-8b-layers are a few layers of these, with random weights.
    """
    from common.random_models import RANDOM_MODELS, random_model
    from common.variants import prefill_variants

    known = model in RANDOM_MODELS
    if layers is not None and not known:
        raise typer.BadParameter(f"--layers needs --model of {', '.join(RANDOM_MODELS)}")
    title = f"prefill of {model}, preset {plan.preset}; no_attention is the ceiling"
    with Report(plan, title, **_options(plan, model, layers=layers)) as report:
        for kind in plan.dtypes:
            device = "cuda" if plan.on_gpu else "cpu"
            network = (
                random_model(model, kind, layers) if known else load_model(model, kind, device)[0]
            )
            network.to(device)
            for count in plan.each_threads():
                last: tuple[int, float] | None = None
                for length in plan.lengths:
                    if not plan.affords(length, last):
                        report.note(f"N >= {length} left out, they need a larger --seconds")
                        break
                    ids = random_ids(network, length, torch.Generator().manual_seed(0))
                    variants = prefill_variants(network, ids, plan.config())
                    timings = compare_on(plan.on_gpu, variants, plan.seconds)
                    last = (length, sum(map(timings.median, variants)))
                    where = _where(length, kind, count)
                    for name in variants:
                        report.add(
                            **where | ({"device": "cuda"} if plan.on_gpu else {}),
                            **rate_fields(timings, name, length),
                            **timings.ratio("dense", name).fields("speedup"),
                            speedup_over_chunked=timings.ratio("dense_chunked", name).value,
                        )


@benchmark(app, "decode", **BOTH, **RECOMMENDED, lengths=((8000,), (200,)), seconds=30.0)
def decode(plan: Plan, model: ModelOption = MODEL, text_file: TextFileOption = None) -> None:
    """Time greedy decoding after a prompt of real text, one token a call, over the whole history.

    "stock" is the model with its DynamicCache, which copies the history for every token; "enabled"
    is the enabled one, whose cache does not. Prefill is not timed.
    """
    from common.variants import decode_variants

    corpus, longest = read_corpus(text_file), max(plan.lengths)
    title = f"decoding by {model} after a prompt, preset {plan.preset}"
    options = _options(plan, model, text=corpus.source, steps=STEPS)
    with Report(plan, title, **options) as report:
        for kind, network, _, tokens in load_with_text(plan, model, corpus, longest):
            for length in plan.lengths:
                variants = decode_variants(network, tokens[None, :length], plan.config(), STEPS)
                for count in plan.each_threads():
                    timings = compare(variants, plan.seconds)
                    for name in variants:
                        report.add(
                            **_where(length, kind, count),
                            variant=name,
                            **decoding_fields(timings, name, STEPS),
                            **timings.ratio("stock", name).fields("speedup"),
                        )


@benchmark(
    app, "session", dtype="bfloat16", **RECOMMENDED, lengths=((8000,), (200,)), seconds=150.0
)
def session(plan: Plan, model: ModelOption = MODEL, text_file: TextFileOption = None) -> None:
    """Time ten questions about one text: prefilled with each, or once, kept in memory or in a file.

    "prefixes" keeps it in a PrefixCache, "reopened" has the file already. "speedup" is over the
    text prefilled with each question.
    """
    from common.variants import QUESTIONS, session_variants

    corpus, longest = read_corpus(text_file), max(plan.lengths)
    options = _options(plan, model, text=corpus.source, steps=STEPS, questions=QUESTIONS)
    with (
        tempfile.TemporaryDirectory() as folder,
        Report(plan, f"{QUESTIONS} questions, preset {plan.preset}", **options) as report,
    ):
        path = Path(folder) / "text.session"
        for kind, network, _, tokens in load_with_text(plan, model, corpus, longest):
            for length in plan.lengths:
                ids = tokens[None, :length]
                variants = session_variants(network, ids, plan.config(), path, STEPS)
                for count in plan.each_threads():
                    timings = compare(variants, plan.seconds)
                    for name in variants:
                        report.add(
                            **_where(length, kind, count),
                            **rate_fields(timings, name, QUESTIONS * STEPS),
                            **timings.ratio("each", name).fields("speedup"),
                            file_mb=path.stat().st_size / 1e6,
                        )


@benchmark(
    app, "package", dtype="bfloat16", **RECOMMENDED, lengths=((4096, 8000), (200,)), seconds=60.0
)
def package(
    plan: Plan,
    model: ModelOption = MODEL,
    int8: Annotated[
        bool, typer.Option("--int8", help="Add int8 linear layers, compiled: needs torchao.")
    ] = False,
) -> None:
    """Time prefill and greedy decoding by a package and by transformers, on real text.

    "eager" is the enabled model, "compiled" the same by torch.compile, "compiled_int8" that with
    linear layers rounded by torchao, "dense" the model without h2o_prefill, "decode_stock" its
    decoding with a DynamicCache. "speedup" says how many times as fast the package is as each of
    them. The package is exported first, and a model compiled for each length, which takes minutes.
    """
    from common.packages import package_decoder, prefill_package
    from common.variants import compiled_prefill, decode_variants, int8_twin, prefill_variants

    if int8 and importlib.util.find_spec("torchao") is None:
        raise typer.BadParameter("--int8 needs torchao: pip install torchao")
    config, corpus, longest = plan.config(), read_corpus(None), max(plan.lengths)
    options = _options(plan, model, text=corpus.source, steps=STEPS)
    with (
        tempfile.TemporaryDirectory() as folder,
        Report(plan, f"{model} as a package", **options) as report,
    ):
        for kind, network, tokenizer, tokens in load_with_text(plan, model, corpus, longest):
            path = Path(folder) / dtype_name(kind)
            write_package(network, tokenizer, config, longest + STEPS, path)
            exported = PrefillPackage(path)
            for length in plan.lengths:
                ids = tokens[None, :length].contiguous()
                eager = prefill_variants(network, ids, config)
                prefills = {
                    "package": partial(prefill_package, exported, ids),
                    "compiled": compiled_prefill(network, ids, config),
                    "eager": eager["sparse"],
                    "dense": eager["dense"],
                }
                if int8:
                    rounded = int8_twin(network)
                    prefills["compiled_int8"] = compiled_prefill(rounded, ids, config)
                stock = decode_variants(network, ids, config, STEPS)
                decodes = {
                    "decode_package": package_decoder(exported, ids, STEPS),
                    "decode_eager": stock["enabled"],
                    "decode_stock": stock["stock"],
                }
                for count in plan.each_threads():
                    for calls, number in ((prefills, length), (decodes, STEPS)):
                        timings = compare(calls, plan.seconds)
                        for name in calls:
                            report.add(
                                **_where(length, kind, count),
                                **rate_fields(timings, name, number),
                                # The package is the first.
                                **timings.ratio(name, next(iter(calls))).fields("speedup"),
                            )


if __name__ == "__main__":
    app()
