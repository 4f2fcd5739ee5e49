"""Windows of a text, scores of their tokens, and estimates, against the formulas written out."""

import math

import pytest
import torch
from torch.nn import functional

from h2o_prefill.eval import scores as scoring
from h2o_prefill.eval.forward import PromptLogits
from h2o_prefill.generation.text import parse_windows, select_windows


def test_windows_are_a_slice_that_drops_the_rest():
    slices = {"0:6": (0, 6), "2:3": (2, 3), ":4": (0, 4), "3:": (3, None), ":": (0, None)}
    assert {text: parse_windows(text) for text in slices} == slices
    for text in ("", "6", "a:b", "-1:2", "3:3", "0:2:1", "0.5:2"):
        with pytest.raises(ValueError, match="windows must be a slice like 0:6"):
            parse_windows(text)
    selected, windows = select_windows(torch.arange(35), 10, "1:")
    assert selected == range(1, 3)
    assert windows.tolist() == [list(range(10, 20)), list(range(20, 30))]
    for tokens, text, message in (
        (9, "0:1", "text must hold at least one window of 10 tokens, got 9"),
        (35, "0:4", "windows must be a slice within 0:3"),
        (35, "3:", "windows must be a slice within 0:3"),
    ):
        with pytest.raises(ValueError, match=message):
            select_windows(torch.arange(tokens), 10, text)


@pytest.mark.parametrize("numbers", [70, 1 << 20])  # three rows, everything at once
@pytest.mark.parametrize("rows", [range(0, 15), range(8, 15)])
def test_scores_equal_the_direct_computation(monkeypatch, numbers, rows):
    monkeypatch.setattr(scoring, "_SLICE_NUMBERS", numbers)
    generator = torch.Generator().manual_seed(0)
    dense = 3 * torch.randn(16, 23, generator=generator)
    sparse = dense + torch.randn(16, 23, generator=generator)
    ids = torch.randint(0, 23, (16,), generator=generator)

    runs = PromptLogits(dense, None), PromptLogits(sparse, None)
    scores = scoring.score_window(*runs, ids, rows)

    p, q = dense[rows.start : rows.stop], sparse[rows.start : rows.stop]
    targets = ids[rows.start + 1 : rows.stop + 1]
    for ours, logits in ((scores.dense_nll, p), (scores.sparse_nll, q)):
        expected = functional.cross_entropy(logits, targets, reduction="none")
        torch.testing.assert_close(ours, expected)
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    kl = functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(scores.kl, kl)
    same = p.argmax(-1) == q.argmax(-1)
    assert 0 < same.sum() < len(rows)
    assert torch.equal(scores.same_top1, same)
    assert torch.equal(scoring.token_nll(runs[1], ids, rows), scores.sparse_nll)


def test_impossible_tokens_add_nothing_to_kl():
    dense = torch.tensor([[0.0, 1.0, -torch.inf], [0.0, 0.0, 0.0]])
    sparse = torch.tensor([[1.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]])
    runs = PromptLogits(dense, None), PromptLogits(sparse, None)
    scores = scoring.score_window(*runs, torch.tensor([0, 1]), range(0, 1))
    p = torch.tensor([0.0, 1.0]).softmax(0)
    expected = (p * (p.log() - p.flip(0).log())).sum()
    torch.testing.assert_close(scores.kl, expected.unsqueeze(0))


@pytest.fixture
def nll():
    return torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) * 5


def test_relative_difference_pairs_windows_or_blocks_of_one(nll):
    sparse = nll + torch.tensor([[0.1], [0.2], [0.6]])
    # Sample deviation of 0.1, 0.2, 0.6: sqrt((0.04 + 0.01 + 0.09) / 2).
    expected = 100 * math.expm1(0.3), 100 * math.exp(0.3) * math.sqrt(0.07 / 3)
    assert scoring.relative_difference(nll, sparse) == pytest.approx(expected, rel=1e-6)

    dense = torch.zeros(1, 2 * scoring.BLOCK_TOKENS)
    sparse = dense.clone()
    sparse[:, scoring.BLOCK_TOKENS :] = 0.2
    # Two blocks, of 0 and 0.2: mean 0.1, sample deviation 0.2 / sqrt(2).
    expected = 100 * math.expm1(0.1), 100 * math.exp(0.1) * 0.1
    assert scoring.relative_difference(dense, sparse) == pytest.approx(expected, rel=1e-6)

    delta, error = scoring.relative_difference(torch.ones(1, 5), torch.ones(1, 5))
    assert delta == 0 and math.isnan(error)
