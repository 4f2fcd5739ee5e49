"""Perplexities and their errors, against the formulas written out."""

from __future__ import annotations

import math

import pytest
import torch

from h2o_prefill.eval.perplexity import estimates


@pytest.fixture
def nll() -> torch.Tensor:
    return torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) * 5


def test_perplexity_is_exp_of_the_mean(nll: torch.Tensor) -> None:
    direct = math.exp(sum(nll.flatten().tolist()) / nll.numel())
    assert estimates.perplexity(nll) == pytest.approx(direct, rel=1e-12)


def test_perplexity_error_is_llama_cpps(nll: torch.Tensor) -> None:
    values = nll.flatten().tolist()
    mean = sum(values) / len(values)
    mean_square = sum(value * value for value in values) / len(values)
    direct = math.exp(mean) * math.sqrt((mean_square - mean * mean) / (len(values) - 1))
    assert estimates.perplexity_error(nll) == pytest.approx(direct, rel=1e-6)
    assert math.isnan(estimates.perplexity_error(nll[:1, :1]))


def test_relative_difference_pairs_windows(nll: torch.Tensor) -> None:
    sparse = nll + torch.tensor([[0.1], [0.2], [0.6]])
    delta, error = estimates.relative_difference(nll, sparse)
    ratio = math.exp(0.3)
    # sample deviation of 0.1, 0.2, 0.6: sqrt((0.04 + 0.01 + 0.09) / 2)
    assert delta == pytest.approx(100 * (ratio - 1), rel=1e-6)
    assert error == pytest.approx(100 * ratio * math.sqrt(0.07) / math.sqrt(3), rel=1e-6)


def test_relative_difference_of_one_window_pairs_blocks() -> None:
    dense = torch.zeros(1, 2 * estimates.BLOCK_TOKENS)
    sparse = dense.clone()
    sparse[:, estimates.BLOCK_TOKENS :] = 0.2
    delta, error = estimates.relative_difference(dense, sparse)
    # two blocks, of 0 and 0.2: mean 0.1, sample deviation 0.2 / sqrt(2)
    assert delta == pytest.approx(100 * (math.exp(0.1) - 1), rel=1e-6)
    assert error == pytest.approx(100 * math.exp(0.1) * 0.1, rel=1e-6)


def test_relative_difference_of_one_block_has_no_error() -> None:
    delta, error = estimates.relative_difference(torch.ones(1, 5), torch.ones(1, 5))
    assert delta == 0
    assert math.isnan(error)


def test_binned_perplexity_leaves_out_minus_one(nll: torch.Tensor) -> None:
    bins = torch.tensor([-1] * 5 + [0] * 10 + [2] * 5)
    first, empty, last = estimates.binned_perplexity(nll, bins, 3)
    assert first == pytest.approx(math.exp(nll[:, 5:15].mean().item()), rel=1e-6)
    assert empty is None
    assert last == pytest.approx(math.exp(nll[:, 15:].mean().item()), rel=1e-6)
