"""`h2o-prefill generate`: continue a prompt after sparse prefill."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from rich.console import Console

from h2o_prefill.cli import console, options, outputs
from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation.prompts import check_prompt, encode_turn, without_middle
from h2o_prefill.generation.text import read_text

if TYPE_CHECKING:
    from torch import Tensor

    from h2o_prefill.generation.generate import GenerationTiming, Sampling


@dataclass(frozen=True)
class PromptOptions:
    """One prompt, and what runs it."""

    prompt: str | None = typer.Argument(None, help="Text to continue.", show_default=False)
    prompt_file: Path | None = typer.Option(
        None, metavar="FILE", help="UTF-8 text file that holds the prompt."
    )
    package: Path | None = typer.Option(
        None,
        metavar="FILE.pt2",
        help="Package that h2o-prefill export wrote, instead of a model; its settings and data "
        "type are used.",
    )
    session: Path | None = typer.Option(
        None,
        metavar="FILE",
        help="Session file: its text is continued if the file exists, and then it is written, "
        "with the prompt and the answer. Model, settings and data type must equal the "
        "file's.",
    )
    draft_tokens: int | None = typer.Option(
        None,
        metavar="N",
        min=1,
        help="With --package: draft up to N tokens by how the text continued before, and verify "
        "them in one call.",
    )
    max_prompt_tokens: int | None = typer.Option(
        None,
        metavar="N",
        min=2,
        help="Cut a longer prompt to N tokens by leaving out its middle.",
    )

    def read(self) -> str:
        """Return the text of the prompt."""
        if (self.prompt is None) == (self.prompt_file is None):
            raise ValueError("give a prompt or --prompt-file, one of the two")
        text = self.prompt or ""
        if self.prompt_file is not None:
            text = read_text(self.prompt_file, "--prompt-file")
        check_prompt(text)
        return text

    def encode(self, tokenizer: Any, text: str, before: Tensor | None, chat: bool) -> Tensor:
        """Return the token ids of the prompt after those before it, cut if it is too long."""
        ids = encode_turn(tokenizer, text, before, chat=chat)
        longest = self.max_prompt_tokens
        if longest is None or ids.shape[1] <= longest:
            return ids
        console.stderr.print(f"the prompt's {ids.shape[1]} tokens are cut to {longest}")
        return without_middle(ids, longest)


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

        given = {name: value for name, value in vars(self).items() if value is not None}
        return Sampling(**given) if len(given) > 1 else None


@options.command
def generate(
    one: PromptOptions,
    model: options.ModelOptions,
    sampling: SamplingOptions,
    settings: options.SettingsOptions,
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

    if one.draft_tokens is not None and one.package is None:
        raise ValueError("--draft-tokens needs --package")
    config = settings.find()
    text = one.read()
    if one.package is not None and options.given(settings):
        raise ValueError("--package has its own settings: leave out --preset and the sizes")
    if one.session is not None:
        outputs.check_output_file(one.session, "--session")

    def show(piece: str) -> None:
        console.check_interrupt()
        print(piece, end="", flush=True)

    network: Any
    with contextlib.ExitStack() as stack:
        if one.package is None:
            network, tokenizer = model.load()
            handle = stack.enter_context(enable(network, config, tokenizer=tokenizer))
        else:
            model.use_threads()
            with Console(stderr=True).status(f"loading {one.package}"):
                network, tokenizer = load_package(one.package)
        kept = None if one.session is None else open_session(one.session, network)
        before = None if kept is None else kept.token_ids
        ids = one.encode(tokenizer, text, before, chat)
        given = ids, max_new_tokens, show, kept, sampling.find(), one.draft_tokens or 0
        with contextlib.nullcontext() if one.package else _bar_of_layers(network):
            timing = generate_timed(network, tokenizer, *given)
        past = 0 if before is None else before.shape[1]
        length = past + timing.prompt_tokens
        if one.package is None:
            kl = next(iter(handle.report().estimated_kl or ()), nan)
            config = handle.state.resolve(network, length)
        else:
            kl = network.estimated_kl
            config = network.info.resolve(length)
        if one.session is not None and kept is not None:
            kept.save(one.session, *([] if one.package else [network]))
    print()
    console.stderr.print(_summary(timing, config, kl, past), style="dim")
    if one.session is not None:
        console.stderr.print(f"wrote {one.session}")


@contextlib.contextmanager
def _bar_of_layers(network: Any) -> Iterator[None]:
    """Show how many layers a prompt has passed, until it has passed all."""
    from h2o_prefill.hf.report import attention_layers

    layers, passed = attention_layers(network, None), itertools.count(1)
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(console.show_progress("prefill"))

        def count(*_: object) -> None:
            done = next(passed)
            step(done, len(layers), "prefill, layers")
            if done == len(layers):
                stack.close()

        for layer in layers:
            stack.callback(layer.register_forward_hook(count).remove)
        yield


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
