"""Scores made in slices, against the whole distribution at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from h2o_prefill.eval.forward import PromptLogits
from h2o_prefill.eval.perplexity import scoring


@pytest.mark.parametrize("numbers", [1, 70, 1 << 20])  # one row, three rows, everything at once
@pytest.mark.parametrize("rows", [range(0, 15), range(8, 15)])
def test_scores_equal_the_direct_computation(
    monkeypatch: pytest.MonkeyPatch, numbers: int, rows: range
) -> None:
    monkeypatch.setattr(scoring, "_SLICE_NUMBERS", numbers)
    generator = torch.Generator().manual_seed(0)
    dense = 3 * torch.randn(16, 23, generator=generator)
    sparse = dense + torch.randn(16, 23, generator=generator)
    ids = torch.randint(0, 23, (16,), generator=generator)

    scores = scoring.score_window(PromptLogits(dense, None), PromptLogits(sparse, None), ids, rows)

    chosen = slice(rows.start, rows.stop)
    targets = ids[rows.start + 1 : rows.stop + 1]
    log_p, log_q = dense[chosen].log_softmax(-1), sparse[chosen].log_softmax(-1)
    kl = functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    cross_entropy = functional.cross_entropy
    torch.testing.assert_close(
        scores.dense_nll, cross_entropy(dense[chosen], targets, reduction="none")
    )
    torch.testing.assert_close(
        scores.sparse_nll, cross_entropy(sparse[chosen], targets, reduction="none")
    )
    torch.testing.assert_close(scores.kl, kl)
    same = dense[chosen].argmax(-1) == sparse[chosen].argmax(-1)
    assert 0 < same.sum() < len(rows)
    assert torch.equal(scores.same_top1, same)
    alone = scoring.token_nll(PromptLogits(sparse, None), ids, rows)
    assert torch.equal(alone, scores.sparse_nll)


def test_impossible_tokens_add_nothing_to_kl() -> None:
    dense = torch.tensor([[0.0, 1.0, -torch.inf], [0.0, 0.0, 0.0]])
    sparse = torch.tensor([[1.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]])
    scores = scoring.score_window(
        PromptLogits(dense, None), PromptLogits(sparse, None), torch.tensor([0, 1]), range(0, 1)
    )
    p = torch.tensor([0.0, 1.0]).softmax(0)
    expected = (p * (p.log() - p.flip(0).log())).sum()
    torch.testing.assert_close(scores.kl, expected.unsqueeze(0))
