"""Enabled models in EleutherAI's lm-evaluation-harness.

    python -m h2o_prefill.eval.lm_harness run --model h2o_prefill \
        --model_args pretrained=smollm2-135m,settings=recommended --tasks lambada_openai

This is `lm_eval` with one model more; it does not look for models of other packages by itself. In
Python `simple_evaluate(model=HFLM(model))` takes a model that is enabled.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation.models import load_model
from h2o_prefill.hf.enable import enable


@register_model("h2o_prefill")
class PrefillLM(HFLM):
    """A causal language model of lm_eval whose long prompts are prefilled by this library.

    `pretrained` and `dtype` are as `load_model` takes them, `settings` as `enable` does; fields of
    the settings may follow as arguments of their own, `settings=recommended,local_window=256`.
    Other options are arguments of `lm_eval.models.huggingface.HFLM`.
    """

    def __init__(
        self,
        pretrained: str = "smollm2-135m",
        settings: str | None = None,
        dtype: str = "float32",
        **options: Any,
    ) -> None:
        names = {field.name for field in fields(PrefillConfig)}
        changes = {name: options.pop(name) for name in list(options) if name in names}
        model, tokenizer = load_model(pretrained, dtype)
        super().__init__(model, tokenizer=tokenizer, **options)
        text = ",".join(
            [*([settings] if settings else []), *(f"{k}={v}" for k, v in changes.items())]
        )
        self.handle = enable(model, text or None, tokenizer=tokenizer)

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm_eval keeps of the model, and the settings."""
        return {**super().get_model_info(), "h2o_prefill": self.handle.config.to_string()}


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
