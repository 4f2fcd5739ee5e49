"""Runs of a model: the forward pass that keeps hidden states, and models that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import h2o_prefill
from h2o_prefill import eval as evaluation
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.forward import PromptForward
from h2o_prefill.eval.inputs.text import Corpus

TEXT = Corpus("foxes", "A quick brown fox did jump over it. " * 50, "foxes.txt")
WINDOW: dict[str, Any] = {"context": 64, "windows": "0:1"}
RUNS: dict[str, Callable[[Any, Any, Any, Path], Any]] = {
    "perplexity": lambda m, t, c, out: evaluation.evaluate_perplexity(
        m, TEXT, c, tokenizer=t, **WINDOW
    ),
    "ablation": lambda m, t, c, out: evaluation.run_ablation(
        m, {}, out, base=c, datasets=[TEXT], tokenizer=t, contexts=[64], windows="0:1"
    ),
    "calibration": lambda m, t, c, out: evaluation.calibrate_layers(
        m, TEXT, c, layers=1, tokenizer=t, **WINDOW
    ),
    "retrieval": lambda m, t, c, out: evaluation.evaluate_retrieval(
        m, TEXT, {"x": c}, tokenizer=t, tasks=["single"], lengths=[480]
    ),
    "answers": lambda m, t, c, out: evaluation.compare_answers(
        m, [TEXT], {"x": c}, tokenizer=t, prompts=1, prompt_tokens=100
    ),
    "attention": lambda m, t, c, out: evaluation.measure_attention(m, torch.arange(1, 65), c),
    "patterns": lambda m, t, c, out: evaluation.visualize_attention_patterns(
        m, torch.arange(1, 65), c, out
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_models_that_are_sparse_or_cannot_be_are_refused(
    tiny_model: Any, tiny_tokenizer: Any, small_config: PrefillConfig, tmp_path: Path, run: str
) -> None:
    given = tiny_model, tiny_tokenizer, small_config, tmp_path / "out"
    with (
        h2o_prefill.enable(tiny_model, small_config),
        pytest.raises(ValueError, match=r"model must have .*under h2o_prefill.enable\(\) already"),
    ):
        RUNS[run](*given)
    assert not (tmp_path / "out").exists()
    for layer in tiny_model.model.layers:
        layer.self_attn.is_causal = False
    message = "no layer of LlamaForCausalLM can be sparse"
    warns = run in ("perplexity", "ablation", "calibration")
    with (
        pytest.warns(UserWarning, match=message)
        if warns
        else pytest.raises(NotImplementedError, match=message)
    ):
        RUNS[run](*given)
    assert tiny_model.config._attn_implementation == "sdpa"


class _Softcapped(nn.Module):
    """A model whose logits are more than its output layer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model

    @property
    def base_model(self) -> nn.Module:
        return self.inner.base_model

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    def forward(self, input_ids: Tensor, logits_to_keep: int = 0) -> Tensor:
        return torch.tanh(self.inner(input_ids, logits_to_keep=logits_to_keep).logits)


class _OnlyLogits(nn.Embedding):
    """A model with no base model to speak of."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 257, (1, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_logits_of_slices_are_those_of_one_call_for_one_row(tiny_model: Any, ids: Tensor) -> None:
    full = tiny_model(ids).logits[0]
    forward = PromptForward(tiny_model)
    calls, rows = [], []
    tiny_model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"]), with_kwargs=True
    )
    tiny_model.lm_head.register_forward_hook(
        lambda module, args, output: rows.append(output.shape[1])
    )
    logits, seconds = forward(ids)
    assert [tuple(call.shape) for call in calls] == [(1, 40)] and rows == [1] and seconds > 0
    assert not tiny_model.base_model._forward_hooks
    tiny_model.lm_head._forward_hooks.clear()
    torch.testing.assert_close(logits.slice(3, 17), full[3:17])
    torch.testing.assert_close(logits.slice(0, 40), full)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["softcapped", "only logits"])
def test_other_models_keep_their_full_logits(tiny_model: Any, ids: Tensor, kind: str) -> None:
    model = _Softcapped(tiny_model) if kind == "softcapped" else _OnlyLogits(257, 257)
    logits, _ = PromptForward(model)(ids)
    torch.testing.assert_close(logits.slice(0, 40), model(ids)[0])


@torch.no_grad()
def test_sixteen_bit_logits_are_given_in_fp32(tiny_model: Any, ids: Tensor) -> None:
    model = tiny_model.to(torch.bfloat16)
    logits, _ = PromptForward(model)(ids)
    assert logits.slice(0, 2).dtype == torch.float32
    torch.testing.assert_close(logits.slice(0, 40), model(ids).logits[0].float(), atol=0.1, rtol=0)
