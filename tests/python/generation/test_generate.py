"""Sampling: the tokens that transformers draws from the same logits and random numbers."""

import torch

from h2o_prefill.generation.generate import Sampling, generate_timed


def test_a_model_and_a_package_draw_the_same(tiny, tiny_model, tiny_tokenizer):
    sampling = Sampling(temperature=1.5, top_k=20, top_p=0.6, seed=5)
    ids = tiny_tokenizer(tiny.SENTENCE, return_tensors="pt").input_ids
    texts = []
    generate_timed(tiny_model, tiny_tokenizer, ids, 12, texts.append, sampling=sampling)
    drawn, sampler = ids, sampling.sampler()
    for _ in range(12):
        logits = tiny_model(drawn).logits[:, -1]
        drawn = torch.cat([drawn, torch.tensor([[sampler.next(drawn, logits)]])], dim=1)
    assert "".join(texts) == tiny_tokenizer.decode(drawn[0, ids.shape[1] :])
    greedy = []
    generate_timed(tiny_model, tiny_tokenizer, ids, 12, greedy.append)
    assert texts != greedy
