"""The loss where a passage comes again in another form: what tokens do not repeat.

Lexical recall finds a passage that is repeated word for word. In these windows a passage of a
quarter of the window is followed by other text and comes again in capitals, with another spelling,
as code with other names, and so on; "same" repeats it unchanged, for comparison.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from common.benchmark import (
    ModelOption,
    Plan,
    TextFileOption,
    benchmark,
    dtype_name,
    load_with_text,
    new_app,
    read_corpus,
)
from common.report import Report
from common.variations import VARIATIONS, build_window
from selections import losses, run_of

from h2o_prefill.generation.runs import DENSE
from h2o_prefill.presets import SPARSE_PRESETS

app = new_app()


@benchmark(app, "variations", dtype="float32", lengths=((4096,), (256,)))
def variations(
    plan: Plan,
    model: ModelOption = "smollm2-135m",
    text_file: TextFileOption = None,
    forms: Annotated[
        str, typer.Option(metavar="NAME,NAME,...", help=f"Of {', '.join(VARIATIONS)}.")
    ] = ",".join(VARIATIONS),
    variants: Annotated[
        list[str], typer.Option("--variant", help="Settings, or RULE=SIZE; repeatable.")
    ] = SPARSE_PRESETS,
) -> None:
    """Show what sparse prefill loses on each window, and on the changed passage of it alone."""
    unknown = set(forms.split(",")) - set(VARIATIONS)
    if unknown:
        raise typer.BadParameter(f"forms must be of {', '.join(VARIATIONS)}, got {unknown}")
    corpus = read_corpus(text_file)
    title = "a passage that comes again in another form"
    with torch.no_grad(), Report(plan, title, model=model, text=corpus.source) as report:
        ((dtype, network, tokenizer, _),) = load_with_text(plan, model, corpus, 1)
        for length in plan.lengths:
            for form in forms.split(","):
                ids, changed = build_window(form, tokenizer, corpus.text, length)
                prompt = ids.unsqueeze(0)
                dense = run_of(DENSE, plan, network, tokenizer)(prompt)[0]
                for variant in variants:
                    sparse = run_of(variant, plan, network, tokenizer)(prompt)[0]
                    whole = losses([prompt], [dense], [sparse])
                    # The row before a token scores it.
                    part = losses([prompt], [dense], [sparse], changed - 1)
                    report.add(
                        form=form,
                        variant=variant,
                        length=length,
                        dtype=dtype_name(dtype),
                        **whole,
                        changed_tokens=length - changed,
                        changed_loss_percent=part["loss_percent"],
                        changed_kl=part["kl"],
                    )


if __name__ == "__main__":
    app()
