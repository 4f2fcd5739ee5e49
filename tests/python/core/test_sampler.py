"""The sampler of C++ beside the logits processors of transformers and torch.multinomial."""

import pytest
import torch
from transformers.generation import logits_process

Sampler = torch.classes.h2o_prefill.Sampler

OPTIONS = {
    "temperature": [0.3, 1.0, 2.5],
    "top_k": [0, 1, 7, 10**6],
    "top_p": [1.0, 0.9, 0.2, 1e-6],
    "min_p": [0.0, 0.05, 1.0],
    "penalty": [1.0, 1.3, 0.8],
}


def processors(temperature, top_k, top_p, min_p, penalty):
    """Those that `generate` puts together: one whose option changes nothing is left out."""
    kinds = {
        "RepetitionPenaltyLogitsProcessor": (penalty, 1.0),
        "TemperatureLogitsWarper": (temperature, None),
        "TopKLogitsWarper": (top_k, 0),
        "TopPLogitsWarper": (top_p, 1.0),
        "MinPLogitsWarper": (min_p, 0.0),
    }
    used = (getattr(logits_process, kind)(x) for kind, (x, none) in kinds.items() if x != none)
    return logits_process.LogitsProcessorList(used)


@pytest.mark.parametrize("seed", range(40))
def test_transformers_draws_the_same_tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(0, 12, (len(OPTIONS),), generator=generator).tolist()
    options = {name: x[i % len(x)] for (name, x), i in zip(OPTIONS.items(), picks, strict=True)}
    ids = torch.randint(0, 60, (1, 30), generator=generator)
    logits = 3 * torch.randn(20, 1, 60, generator=generator)
    sampler, chosen = Sampler(**options, seed=seed), processors(**options)
    drawing = torch.Generator().manual_seed(seed)
    for row in logits:
        scores = chosen(ids, row.clone())
        expected = torch.multinomial(scores.softmax(-1), 1, generator=drawing)
        assert sampler.next(ids, row) == expected
        ids = torch.cat([ids, expected], dim=1)


def test_temperature_0_is_greedy_after_the_penalty():
    logits = torch.tensor([[1.0, 3.0, 2.9, -1.0]]).bfloat16()
    assert Sampler().next(torch.tensor([[1]]), logits) == 1
    assert Sampler(penalty=1.5).next(torch.tensor([[1, 1]]), logits) == 2
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 0"):
        Sampler(top_p=0.0)
    for wrong in (float("nan"), float("inf")):
        logits[0, 2] = wrong
        for sampler in (Sampler(), Sampler(temperature=1.0, top_k=2)):
            with pytest.raises(ValueError, match=f"a finite maximum, got -?{wrong}"):
                sampler.next(torch.tensor([[1]]), logits)
