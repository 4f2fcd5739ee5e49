"""Retrieval runs: answers, scores, the summary and the file."""

import json
import math
import re
from dataclasses import asdict
from itertools import product

import pytest
import torch

import h2o_prefill
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import evaluate_retrieval
from h2o_prefill.eval.report import format_json
from h2o_prefill.eval.retrieval import (
    PromptOutcome,
    retrieval_report,
    substring_score,
    summarize_retrieval,
    wilson_interval,
)
from h2o_prefill.eval.retrieval_prompts import Haystack, build_prompt
from h2o_prefill.generation.text import Corpus
from h2o_prefill.hf.cache import cache_argument
from h2o_prefill.hf.kinds import enabled_of

TEXT = "A quick brown fox did jump over it. The lazy dog sat still all day. " * 60
CORPUS = Corpus("foxes", TEXT, "foxes.txt")
SPARSE = PrefillConfig(chunk_size=64, local_window=16, heavy_budget=16)
VARIANTS = {"small": SPARSE, "recall": SPARSE.replace(recall=2)}


@pytest.fixture
def model(tiny):
    return tiny.make_model(max_position_embeddings=2048)


@pytest.fixture
def reader(model, tiny_tokenizer, monkeypatch):
    """Return the model with answers read off the prompt; sparse, it has only the second half."""
    random_answer = model.generate

    def generate(input_ids, **options):
        text = tiny_tokenizer.decode(input_ids[0])
        key = re.findall(r"for (\w+-\w+) mentioned", text)[-1]
        if _is_sparse(model):
            text = text[len(text) // 2 :]
        found = re.findall(rf"numbers for {key} is: (\d+)", text)
        answer = tiny_tokenizer(f" {', '.join(found)}.", return_tensors="pt")["input_ids"]
        output = random_answer(input_ids, **{**options, "max_new_tokens": 1})
        output.sequences = torch.cat([input_ids, answer[:, : options["max_new_tokens"]]], dim=1)
        return output

    monkeypatch.setattr(model, "generate", generate, raising=False)
    return model


def _is_sparse(model):
    enabled = enabled_of(model.config)
    return enabled is not None and not enabled.config.exact


def _run(model, tokenizer, **changes):
    settings = dict(tasks=["single"], lengths=[800], depths=[0, 100])
    return evaluate_retrieval(
        model, CORPUS, VARIANTS, tokenizer=tokenizer, **{**settings, **changes}
    )


def test_scores_and_the_file(reader, tiny_tokenizer):
    steps = []
    settings = dict(tasks=["single", "multi_key"], lengths=[900, 1200], prompts_per_cell=2, seed=7)
    result = _run(reader, tiny_tokenizer, on_progress=lambda *step: steps.append(step), **settings)
    assert [step[0] for step in steps] == list(range(49)) and {step[1] for step in steps} == {48}
    assert steps[0][2] == "single 900 0 % dense" and steps[7][2] == "single 900 100 % small"
    keys = zip(*(result.summary[name] for name in ("task", "length", "variant")), strict=True)
    assert list(keys) == list(product(settings["tasks"], (900, 1200), ("dense", *VARIANTS)))
    for row in result.summary.itertuples():
        assert (row.prompts, row.dense_solved) == (4, 4)
        share = 1 if row.variant == "dense" else 0.5
        assert (row.accuracy, row.kept) == (share, share)
        assert row.accuracy_interval == row.kept_interval == wilson_interval(share, 4)
    for outcome in result.outcomes:
        (answer,) = outcome.answers
        assert outcome.outputs["dense"] == f" {answer}."
        expected = {"dense": 1, "small": outcome.depth / 100, "recall": outcome.depth / 100}
        assert outcome.scores == expected
    assert len({outcome.seed for outcome in result.outcomes}) == 16
    report = json.loads(format_json(retrieval_report(result, model="reader")))
    assert report["config"]["variants"]["recall"]["recall"] == 2
    expected = {"seed": 7, "model": "reader", "text_source": "foxes.txt"}
    assert report["config"].items() >= expected.items()
    assert report["prompts"] == json.loads(json.dumps(asdict(result)["outcomes"]))


def test_answers_are_what_the_model_generates_after_each_prefill(model, tiny_tokenizer):
    from transformers import DynamicCache

    calls = []

    def note(module, args, kwargs, output):
        sizes = (kwargs["input_ids"].shape[1], output.logits.shape[1])
        calls.append((*sizes, _is_sparse(module)))

    model.train()
    handle = model.register_forward_hook(note, with_kwargs=True)
    result = _run(model, tiny_tokenizer, depths=[50])
    handle.remove()
    assert model.training and model.config._attn_implementation == "sdpa"
    (outcome,) = result.outcomes
    # One call for the prompt, with the logits of one token, one for each token of the answer, and
    # one for the expected answer: a space and seven digits.
    longer = [call for call in calls if call[0] > 1]
    assert longer == [
        call
        for sparse in (False, True, True)
        for call in ((outcome.prompt_tokens, 1, sparse), (8, 8, sparse))
    ]
    assert len(calls) == 3 * 25

    model.eval()
    prompt = build_prompt(
        "single", tiny_tokenizer, Haystack(TEXT), 800, 50, seed=outcome.seed
    ).input_ids
    spoken = {"dense": model.generate(prompt, max_new_tokens=24, do_sample=False)}
    for name, config in VARIANTS.items():
        with h2o_prefill.enable(model, config):
            spoken[name] = model.generate(prompt, max_new_tokens=24, do_sample=False)
    for name, ids in spoken.items():
        answer = tiny_tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)
        assert outcome.outputs[name] == answer
    assert outcome.outputs["dense"] != outcome.outputs["small"], "the variant was not sparse"

    answer = tiny_tokenizer(f" {outcome.answers[0]}", return_tensors="pt")["input_ids"]
    for name, config in {"dense": "exact", **VARIANTS}.items():
        # Decoding appends token by token to what the sparse call left.
        options = {"use_cache": True, **cache_argument(model, DynamicCache(config=model.config))}
        with h2o_prefill.enable(model, config), torch.no_grad():
            rows = [
                model(ids, logits_to_keep=1, **options).logits[0]
                for ids in (prompt, *answer[:, :-1].split(1, dim=1))
            ]
        expected = torch.cat(rows).log_softmax(-1).gather(1, answer.T).mean()
        assert outcome.log_probs[name] == pytest.approx(float(expected), rel=1e-4)
    assert outcome.log_probs["dense"] != pytest.approx(outcome.log_probs["small"], abs=1e-3)
    # A random model solves nothing.
    assert (result.summary["dense_solved"] == 0).all() and result.summary["kept"].isna().all()


def test_scores_and_intervals():
    assert substring_score("It is 1234567.", ("1234567",)) == 1
    assert substring_score("1,234,567", ("1234567",)) == 0
    assert substring_score("AbCdE, and fghij", ("ABCDE", "FGHIJ", "KLMNO", "PQRST")) == 0.5
    for share, count, *expected in (
        (0, 10, 0.0, 0.2775328),
        (1, 10, 0.7224672, 1.0),
        (0.5, 10, 0.2365931, 0.7634069),
        # An example of Newcombe (1998), table I.
        (81 / 263, 263, 0.2553, 0.3662),
    ):
        assert wilson_interval(share, int(count)) == pytest.approx(expected, abs=1e-4)
    assert all(math.isnan(bound) for bound in wilson_interval(math.nan, 0))


def test_the_summary_counts_only_what_dense_solves():
    scores = [(1.0, 1.0), (1.0, 0.5), (0.75, 1.0), (0.0, 0.0), (1.0, 1.0)]
    outcomes = [
        PromptOutcome(
            *("multi_value", 2048, 0, 1, 2000, ("1",), {}),
            {"dense": dense, "x": sparse},
            {"dense": -dense, "x": -dense - change},
        )
        for (dense, sparse), change in zip(scores, (0.1, 0.2, 0.3, 0.4, 0.5), strict=True)
    ]
    dense, x = summarize_retrieval(outcomes, ["dense", "x"]).itertuples()
    assert (dense.accuracy, x.accuracy) == (0.75, 0.7)
    assert (x.prompts, x.dense_solved, x.kept) == (5, 3, 2 / 3)
    assert x.kept_interval == wilson_interval(2 / 3, 3)
    assert x.accuracy_interval == wilson_interval(0.7, 5)
    assert (dense.dense_solved, dense.kept) == (3, 1)
    assert (dense.log_prob, x.log_prob) == pytest.approx((-0.75, -1.05))
    assert (dense.log_prob_change, dense.log_prob_stderr) == (0, 0)
    # Sample deviation of 0.1 .. 0.5: sqrt(0.025), over five prompts.
    assert x.log_prob_change == pytest.approx(-0.3)
    assert x.log_prob_stderr == pytest.approx(math.sqrt(0.025 / 5))
    (one,) = summarize_retrieval(outcomes[:1], ["dense"]).itertuples()
    assert math.isnan(one.log_prob_stderr)
