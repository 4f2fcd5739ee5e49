"""`h2o-prefill generate`: continue a prompt with sparse prefill."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from math import nan
from pathlib import Path
from typing import Annotated, Any

import typer

from h2o_prefill.cli import options
from h2o_prefill.cli.cluster import ClusterOptions, add_cluster_options
from h2o_prefill.cli.console import (
    check_interrupt,
    error_console,
    output_console,
    quiet_libraries,
    say,
    say_written,
    show_progress,
)
from h2o_prefill.cli.errors import kept_on_interrupt
from h2o_prefill.cli.options import load_network
from h2o_prefill.cli.outputs import check_output_file
from h2o_prefill.config import PrefillConfig

_MANY = "Many prompts"
_SAMPLING = "Sampling"


@options.add_size_options
@add_cluster_options
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Text to continue.", show_default=False)
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "--prompt-file", metavar="FILE", help="UTF-8 text file that holds the prompt."
        ),
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input",
            metavar="FILE",
            help='Prompts to answer, as JSON lines: {"prompt": text, "id": text or number}; '
            "without an id it is the number of the line.",
            rich_help_panel=_MANY,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Answers as JSON lines; the same command goes on with the prompts that have none.",
            rich_help_panel=_MANY,
        ),
    ] = None,
    batch_tokens: Annotated[
        int,
        typer.Option(
            "--batch-tokens",
            min=1,
            help="Tokens of a batch of prompts, with padding and new tokens, at most; a longer "
            "prompt is a batch by itself.",
            rich_help_panel=_MANY,
        ),
    ] = 16384,
    model: options.ModelOption = "smollm2-135m",
    package: Annotated[
        Path | None,
        typer.Option(
            "--package",
            metavar="FILE.pt2",
            help="Package that h2o-prefill export wrote, instead of a model; its settings and data "
            "type are used.",
        ),
    ] = None,
    session: Annotated[
        Path | None,
        typer.Option(
            "--session",
            metavar="FILE",
            help="Session file: its text is continued if the file exists, and then it is written, "
            "with the prompt and the answer. Model, settings and data type must be those of the "
            "file.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, options.count("--max-new-tokens", "Maximum number of tokens to generate.")
    ] = 128,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat/--raw",
            help="Put the prompt into the model's chat template, or use it as it is.",
        ),
    ] = True,
    draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--draft-tokens",
            metavar="N",
            min=1,
            help="With --package: draft up to so many tokens from how the text went on before, and "
            "verify them in one call.",
        ),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-prompt-tokens",
            metavar="N",
            min=2,
            help="Cut a longer prompt to so many tokens: its middle is left out.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            min=1e-3,
            help="Draw tokens at this temperature; without it, --top-k and --top-p, decoding is "
            "greedy.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k", min=1, help="Draw from the K likeliest tokens.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            min=0.0,
            max=1.0,
            help="Draw from the likeliest tokens whose probabilities add up to this.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the draws.", rich_help_panel=_SAMPLING)
    ] = 0,
    preset: options.PresetOption = None,
    dtype: options.DtypeOption = "float32",
    device: options.DeviceOption = "cpu",
    threads: options.ThreadsOption = None,
    *,
    cluster: ClusterOptions,
    **sizes: int | None,
) -> None:
    """Continue a prompt, or those of a file, after sparse prefill.

    Prompts shorter than a chunk are prefilled densely. Decoding attends to the whole KV cache.
    The prompts of --input are answered in batches of similar length, here or on a Dask cluster. An
    answer is written as soon as its batch is done; a prompt that is empty, too long or fails gets a
    line with an error, and is tried again by the next run.
    """
    if draft_tokens is not None and package is None:
        raise ValueError("--draft-tokens needs --package")
    options.check_preset(preset, **sizes)
    if input_file is not None or output is not None:
        own = (prompt, prompt_file, package, session, max_prompt_tokens, temperature, top_k, top_p)
        if own.count(None) < len(own):
            raise ValueError(
                "--input takes no prompt, --prompt-file, --package, --session, "
                "--max-prompt-tokens or sampling beside it"
            )
        if input_file is None or output is None:
            raise ValueError("give --input and --output, both")
        _answer_file(
            input_file,
            output,
            cluster,
            lambda network: options.find_settings(network, preset, **sizes),
            model=model,
            dtype=dtype,
            device=device,
            threads=threads,
            max_new_tokens=max_new_tokens,
            chat=chat,
            batch_tokens=batch_tokens,
        )
        return
    from h2o_prefill.generation.generate import Sampling, generate_timed
    from h2o_prefill.generation.packages import load_package
    from h2o_prefill.generation.prompts import (
        check_prompt,
        encode_prompt,
        encode_turn,
        without_middle,
    )
    from h2o_prefill.generation.text import read_text
    from h2o_prefill.hf import enable

    with quiet_libraries():
        if cluster.given:
            raise ValueError("a Dask cluster answers the prompts of --input: give a file")
        if (prompt is None) == (prompt_file is None):
            raise ValueError("give a prompt or --prompt-file, one of the two")
        text = (prompt or "") if prompt_file is None else read_text(prompt_file, "--prompt-file")
        check_prompt(text)
        if package is not None and any(x is not None for x in (preset, *sizes.values())):
            raise ValueError("--package has its own settings: leave out --preset and the sizes")
        if session is not None:
            check_output_file(session, "--session")
        network: Any
        if package is not None:
            options.use_threads(threads)
            with error_console().status(f"loading {package}"):
                network, tokenizer = load_package(package)
            config = network.info.config
        else:
            network, tokenizer = load_network(model, dtype, threads, device)
            config = options.find_settings(network, preset, **sizes)
        console = output_console()

        def show(piece: str) -> None:
            check_interrupt()
            console.print(piece, end="", markup=False, soft_wrap=True)

        enabled: Any = contextlib.nullcontext()
        if package is None:
            enabled = enable(network, config, tokenizer=tokenizer)
        with enabled as handle:
            kept = None if session is None else _open_session(session, network)
            before = None if kept is None else kept.token_ids
            past = 0 if before is None else before.shape[1]
            if before is None or past == 0:
                input_ids = encode_prompt(tokenizer, text, chat=chat)
            else:
                input_ids = encode_turn(tokenizer, text, before, chat=chat)
            cut = max_prompt_tokens is not None and input_ids.shape[1] > max_prompt_tokens
            if max_prompt_tokens is not None and cut:
                say(f"the prompt's {input_ids.shape[1]} tokens are cut to {max_prompt_tokens}")
                input_ids = without_middle(input_ids, max_prompt_tokens)
            drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
            given: Any = {name: value for name, value in drawn.items() if value is not None}
            sampling = Sampling(seed=seed, **given) if given else None
            with contextlib.nullcontext() if package else _bar_of_layers(network):
                timing = generate_timed(
                    network,
                    tokenizer,
                    input_ids,
                    max_new_tokens,
                    show,
                    kept,
                    sampling,
                    draft_tokens or 0,
                )
            measured = () if handle is None else handle.report().estimated_kl or ()
            if kept is not None:
                kept.save(session)
        kl = network.estimated_kl if handle is None else next(iter(measured), nan)
        console.print()
        error_console().print(_summary(timing, config, kl, past), style="dim", soft_wrap=True)
        if session is not None:
            say_written(session)


@contextlib.contextmanager
def _bar_of_layers(network: Any) -> Iterator[None]:
    """Show how many layers a prompt has passed, until it has passed all."""
    from h2o_prefill.hf.report import attention_layers

    layers, passed = attention_layers(network, None), 0
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(show_progress("prefill"))

        def count(*_: object) -> None:
            nonlocal passed
            passed += 1
            step(passed, len(layers), "prefill, layers")
            if passed == len(layers):
                stack.close()

        for layer in layers:
            stack.callback(layer.register_forward_hook(count).remove)
        yield


def _answer_file(
    input_file: Path,
    output: Path,
    cluster: ClusterOptions,
    find_settings: Callable[[Any], PrefillConfig],
    *,
    model: str,
    dtype: str,
    device: str,
    threads: int | None,
    **settings: Any,
) -> None:
    from h2o_prefill.generation.prompt_files import answer_prompts, read_prompts

    kept = f"answers are kept in {str(output)!r}, the same command goes on with the other prompts"
    with kept_on_interrupt(kept), quiet_libraries():
        prompts = read_prompts(input_file, "--input")
        check_output_file(output, "--output")
        network, tokenizer = load_network(model, dtype, threads, device)
        with (
            cluster.connect(model, dtype, threads, device) as workers,
            show_progress("generate") as show,
        ):
            found = answer_prompts(
                network,
                tokenizer,
                prompts,
                output,
                find_settings(network),
                cluster=workers,
                on_progress=show,
                **settings,
            )
        say_written(output)
        say(f"{len(prompts)} prompts, {found.reused} of them answered before")
        if found.failed:
            first = found.failed[0]
            raise RuntimeError(
                f"{len(found.failed)} of {len(prompts)} prompts have no answer, first that with "
                f"id {first['id']!r}: {first['error']}"
            )


def _open_session(path: Path, network: Any) -> Any:
    """Return the package, or a cache for the model, with the text of a session if there is one."""
    from h2o_prefill.hf import ChunkedPrefillCache
    from h2o_prefill.package import PrefillPackage

    exists = path.expanduser().exists()
    if isinstance(network, PrefillPackage):
        if exists:
            network.load(path)
        return network
    if not exists:
        return ChunkedPrefillCache(config=network.config)
    cache = ChunkedPrefillCache.load(path, network)
    if cache.token_ids is None:
        raise ValueError(f"session {str(path)!r} must have token ids to be continued by a text")
    return cache


def _summary(timing: Any, config: Any, kl: float, past: int) -> str:
    mode = "sparse"
    if config.exact:
        mode = "exact"
    elif timing.prompt_tokens < config.sparse_from:
        mode = f"dense, since shorter than {config.sparse_from} tokens"
    elif not config.is_sparse_call(past, timing.prompt_tokens):
        mode = "dense, since the memory set is empty"
    if kl > 0:
        mode += f", estimated KL to dense {kl:.4f} nats a token"
    after = f"after {past} " if past else ""
    return (
        f"prefill {timing.prompt_tokens} tokens {after}in {timing.prefill_seconds:.2f} s ({mode}), "
        f"then {timing.new_tokens} tokens in {timing.decode_seconds:.2f} s"
    )
