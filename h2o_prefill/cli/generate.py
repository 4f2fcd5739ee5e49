"""`h2o-prefill generate`: continue a prompt after sparse prefill."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from rich.console import Console

from h2o_prefill.cli import console, options, outputs
from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation.prompts import encode_turn
from h2o_prefill.generation.text import read_text

if TYPE_CHECKING:
    from h2o_prefill.generation.generate import GenerationTiming, Sampling


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn."""

    PANEL: ClassVar = "Sampling"
    temperature: float | None = typer.Option(
        None,
        min=1e-3,
        help="Draw tokens at this temperature; without it, --top-k and --top-p, decoding is "
        "greedy.",
    )
    top_k: int | None = typer.Option(None, min=1, help="Draw from the K likeliest tokens.")
    top_p: float | None = typer.Option(
        None,
        min=0.0,
        max=1.0,
        help="Draw from the likeliest tokens whose probabilities add up to this.",
    )
    seed: int = typer.Option(0, min=-(2**63), max=2**63 - 1, help="Seed of the draws.")

    def find(self) -> Sampling | None:
        """Return how tokens are drawn, None for the likeliest ones."""
        from h2o_prefill.generation.generate import Sampling

        chosen = {name: value for name, value in vars(self).items() if value is not None}
        return Sampling(**chosen) if len(chosen) > 1 else None


@options.command
def generate(
    model: options.ModelOptions,
    sampling: SamplingOptions,
    preset: options.PresetOption = None,
    prompt: str | None = typer.Argument(None, help="Text to continue.", show_default=False),
    prompt_file: Path | None = typer.Option(
        None, metavar="FILE", help="UTF-8 text file that holds the prompt."
    ),
    package: Path | None = typer.Option(
        None,
        metavar="FOLDER",
        help="Package that h2o-prefill export wrote, instead of a model; its settings and data "
        "type are used.",
    ),
    session: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Session file: its text is continued if the file exists, and then it is written, "
        "with the prompt and the answer. Model, settings and data type must equal the "
        "file's.",
    ),
    draft_tokens: int | None = typer.Option(
        None,
        metavar="N",
        min=1,
        help="With --package: draft up to N tokens by how the text continued before, and verify "
        "them in one call.",
    ),
    max_new_tokens: int = typer.Option(128, min=1, help="Maximum number of tokens to generate."),
    chat: bool = typer.Option(
        True,
        "--chat/--raw",
        help="Put the prompt into the model's chat template, or use it as it is.",
    ),
) -> None:
    """Continue a prompt after sparse prefill.

    Prompts for which dense attention is faster are dense. Decoding attends to the whole KV cache.
    """
    from h2o_prefill.generation.generate import generate_timed, open_session
    from h2o_prefill.generation.packages import load_package
    from h2o_prefill.hf import enable

    if draft_tokens is not None and package is None:
        raise ValueError("--draft-tokens needs --package")
    if package is not None and preset is not None:
        raise ValueError("--package has its own settings: leave out --preset")
    if (prompt is None) == (prompt_file is None):
        raise ValueError("give a prompt or --prompt-file, one of the two")
    config = options.find_settings(preset)
    text = prompt or "" if prompt_file is None else read_text(prompt_file, "--prompt-file")
    if not text.strip():
        raise ValueError("prompt must not be empty")
    if session is not None:
        outputs.check_output_file(session, "--session")

    waiting = Console(stderr=True).status("prefill")

    def show(piece: str) -> None:
        waiting.stop()
        print(piece, end="", flush=True)

    network: Any
    with contextlib.ExitStack() as stack:
        if package is None:
            network, tokenizer = model.load()
            handle = stack.enter_context(enable(network, config, tokenizer=tokenizer))
        else:
            model.use_threads()
            with Console(stderr=True).status(f"loading {package}"):
                network, tokenizer = load_package(package)
        cache = None if session is None else open_session(session, network)
        before = None if cache is None else cache.token_ids
        ids = encode_turn(tokenizer, text, before, chat=chat)
        drawn = sampling.find(), draft_tokens or 0
        with waiting:
            timing = generate_timed(network, tokenizer, ids, max_new_tokens, show, cache, *drawn)
        past = 0 if before is None else before.shape[1]
        length = past + timing.prompt_tokens
        if package is None:
            kl = next(iter(handle.report().estimated_kl or ()), nan)
            config = handle.state.resolve(network, length)
        else:
            kl = network.estimated_kl
            config = network.info.resolve(length)
        if session is not None and cache is not None:
            cache.save(session, *([] if package else [network]))
    print()
    console.stderr.print(_summary(timing, config, kl, past), style="dim")
    if session is not None:
        console.stderr.print(f"wrote {session}")


def _summary(timing: GenerationTiming, config: PrefillConfig, kl: float, past: int) -> str:
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
