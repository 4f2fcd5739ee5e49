"""The forward pass that keeps hidden states instead of logits."""

import pytest
import torch
from torch import nn

from h2o_prefill.eval.forward import PromptForward


class _Softcapped(nn.Module):
    """A model whose logits are more than its output layer."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    @property
    def base_model(self):
        return self.inner.base_model

    def get_output_embeddings(self):
        return self.inner.get_output_embeddings()

    def forward(self, input_ids, logits_to_keep=0):
        return torch.tanh(self.inner(input_ids, logits_to_keep=logits_to_keep).logits)


class _OnlyLogits(nn.Embedding):
    """A model with no base model to speak of."""

    def forward(self, input_ids):
        return super().forward(input_ids)


@pytest.fixture
def ids():
    return torch.randint(0, 257, (1, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_logits_of_slices_are_those_of_one_call_for_one_row(tiny_model, ids):
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
    assert min(seconds, forward.prefill(ids)) > 0
    assert [tuple(call.shape) for call in calls] == [(1, 40)] * 2
    assert rows == [1, 1]
    assert not tiny_model.base_model._forward_hooks
    tiny_model.lm_head._forward_hooks.clear()
    torch.testing.assert_close(logits.slice(3, 17), full[3:17])
    torch.testing.assert_close(logits.slice(0, 40), full)


@torch.no_grad()
@pytest.mark.parametrize("softcapped", [True, False])
def test_other_models_keep_their_full_logits(tiny_model, ids, softcapped):
    model = _Softcapped(tiny_model) if softcapped else _OnlyLogits(257, 257)
    forward = PromptForward(model)
    logits, _ = forward(ids)
    torch.testing.assert_close(logits.slice(0, 40), model(ids)[0])
    rows = []
    model.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    forward.prefill(ids)
    assert rows == [1 if softcapped else 40]
