"""Retrieval runs: answers, scores, the summary, the file and the heat map."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import h2o_prefill
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import evaluate_retrieval
from h2o_prefill.eval.inputs.text import Corpus
from h2o_prefill.eval.needles.haystack import Haystack
from h2o_prefill.eval.needles.prompts import build_prompt
from h2o_prefill.eval.needles.result import PromptOutcome, retrieval_report
from h2o_prefill.eval.needles.scoring import (
    substring_score,
    summarize_retrieval,
    wilson_interval,
)
from h2o_prefill.eval.needles.tasks import TASKS
from h2o_prefill.eval.report import write_json

TEXT = "A quick brown fox did jump over it. The lazy dog sat still all day. " * 60
CORPUS = Corpus("foxes", TEXT, "foxes.txt")
SPARSE = PrefillConfig(chunk_size=64, local_window=16, heavy_budget=16)
VARIANTS = {"small": SPARSE, "recall": SPARSE.replace(recall=2, recall_block=32)}


@pytest.fixture
def model(tiny: Any) -> Any:
    return tiny.make_model(max_position_embeddings=2048)


@pytest.fixture
def reader(model: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the model with answers read off the prompt; sparse, it has only the second half."""

    def generate(input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        text = tiny_tokenizer.decode(input_ids[0])
        key = re.findall(r"for (\w+-\w+) mentioned", text)[-1]
        if model.config._attn_implementation == "h2o_prefill":
            text = text[len(text) // 2 :]
        found = re.findall(rf"numbers for {key} is: (\d+)", text)
        answer = tiny_tokenizer(f" {', '.join(found)}.", return_tensors="pt")["input_ids"]
        return torch.cat([input_ids, answer[:, : options["max_new_tokens"]]], dim=1)

    monkeypatch.setattr(model, "generate", generate, raising=False)
    return model


def _run(model: Any, tokenizer: Any, **changes: Any) -> Any:
    settings: dict[str, Any] = dict(tasks=["single"], lengths=[800], depths=[0, 100])
    return evaluate_retrieval(
        model, CORPUS, VARIANTS, tokenizer=tokenizer, **{**settings, **changes}
    )


def test_a_model_that_finds_everything_scores_and_one_that_forgets_does_not(
    reader: Any, tiny_tokenizer: Any
) -> None:
    result = _run(reader, tiny_tokenizer, lengths=[800, 1200], prompts_per_cell=2)
    assert [(row.length, row.variant) for row in result.summary] == [
        (length, name) for length in (800, 1200) for name in ("dense", "small", "recall")
    ]
    for row in result.summary:
        assert (row.task, row.prompts, row.dense_solved) == ("single", 4, 4)
        share = 1 if row.variant == "dense" else 0.5
        assert (row.accuracy, row.kept) == (share, share)
        assert row.accuracy_interval == row.kept_interval == wilson_interval(share, 4)
    for outcome in result.outcomes:
        (answer,) = outcome.answers
        assert outcome.outputs["dense"] == f" {answer}."
        expected = {"dense": 1, "small": outcome.depth / 100, "recall": outcome.depth / 100}
        assert outcome.scores == expected
    assert len({outcome.seed for outcome in result.outcomes}) == 8


def test_several_values_score_by_their_share(reader: Any, tiny_tokenizer: Any) -> None:
    result = _run(reader, tiny_tokenizer, tasks=["multi_value"], depths=[50], prompts_per_cell=4)
    dense, small, _ = result.summary
    assert (dense.accuracy, dense.kept) == (1, 1)
    shares = [outcome.scores["small"] for outcome in result.outcomes]
    assert any(share in (0.25, 0.5, 0.75) for share in shares)
    assert small.accuracy == pytest.approx(sum(shares) / 4)
    assert small.kept == sum(share == 1 for share in shares) / 4


def test_a_model_that_knows_nothing_finds_nothing(model: Any, tiny_tokenizer: Any) -> None:
    result = _run(model, tiny_tokenizer, tasks=list(TASKS), lengths=[1100], depths=[50])
    assert len(result.outcomes) == 5 and len(result.summary) == 15
    for outcome in result.outcomes:
        assert set(outcome.scores.values()) == {0.0}
        assert set(outcome.outputs) == {"dense", "small", "recall"}
        room = 1100 - TASKS[outcome.task].new_tokens
        assert room - 8 <= outcome.prompt_tokens <= room
    for row in result.summary:
        assert (row.accuracy, row.dense_solved) == (0, 0)
        assert math.isnan(row.kept) and math.isnan(row.kept_interval[0])


def test_answers_are_what_the_model_generates_after_each_prefill(
    model: Any, tiny_tokenizer: Any
) -> None:
    result = _run(model, tiny_tokenizer, depths=[50])
    (outcome,) = result.outcomes
    prompt = build_prompt(
        "single", tiny_tokenizer, Haystack(TEXT), 800, 50, seed=outcome.seed
    ).input_ids
    spoken = {"dense": model.generate(prompt, max_new_tokens=24, do_sample=False)}
    for name, config in VARIANTS.items():
        with h2o_prefill.enable(model, config):
            spoken[name] = model.generate(prompt, max_new_tokens=24, do_sample=False)
    assert outcome.outputs == {
        name: tiny_tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)
        for name, ids in spoken.items()
    }
    assert outcome.outputs["dense"] != outcome.outputs["small"], "the variant was not sparse"


def test_every_call_makes_the_logits_of_one_token(model: Any, tiny_tokenizer: Any) -> None:
    calls: list[tuple[int, int, bool]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        sparse = module.config._attn_implementation == "h2o_prefill"
        calls.append((kwargs["input_ids"].shape[1], output.logits.shape[1], sparse))

    model.train()
    model.register_forward_hook(note, with_kwargs=True)
    result = _run(model, tiny_tokenizer, depths=[50])
    length = result.outcomes[0].prompt_tokens
    prefills = [call for call in calls if call[0] > 1]
    assert prefills == [(length, 1, sparse) for sparse in (False, True, True)]
    assert len(calls) == 3 * 24 and {call[1] for call in calls} == {1}
    assert model.training and model.config._attn_implementation == "sdpa"


def test_runs_repeat_and_say_how_far_they_are(reader: Any, tiny_tokenizer: Any) -> None:
    steps: list[tuple[int, int, str]] = []
    first = _run(reader, tiny_tokenizer, on_progress=lambda *step: steps.append(step), seed=3)
    assert first == _run(reader, tiny_tokenizer, seed=3)
    assert first.outcomes != _run(reader, tiny_tokenizer, seed=4).outcomes
    assert [step[0] for step in steps] == list(range(7)) and {step[1] for step in steps} == {6}
    assert steps[0][2] == "single 800 0 % dense" and steps[4][2] == "single 800 100 % small"
    other = _run(reader, tiny_tokenizer, seed=3, question="first")
    assert [o.answers for o in other.outcomes] == [o.answers for o in first.outcomes]


def test_the_file_and_the_heat_map(reader: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from h2o_prefill.eval.needles.plot import mean_scores, plot_retrieval

    result = _run(
        reader, tiny_tokenizer, tasks=["single", "multi_key"], lengths=[900, 1200], seed=7
    )
    write_json(retrieval_report(result, model="reader"), tmp_path / "r.json")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["config"]["variants"]["recall"]["recall"] == 2
    assert report["config"]["seed"] == 7 and report["config"]["model"] == "reader"
    assert report["config"]["text_source"] == "foxes.txt"
    assert len(report["prompts"]) == 8 and len(report["summary"]) == 12
    assert report["prompts"][0] == json.loads(json.dumps(result.to_dict()["outcomes"][0]))
    assert "torch" in report["environment"]
    scores = mean_scores(result, "multi_key", "small", [0, 100], [900, 1200])
    assert scores == [[0, 0], [1, 1]]
    figure = plot_retrieval(result, tmp_path / "r.png", "title")
    maps = [axes for axes in figure.axes if axes.images][:6]
    assert [axes.get_title() for axes in maps[:3]] == ["dense", "small", "recall"]
    assert [axes.get_ylabel().split("\n")[0] for axes in maps[::3]] == ["single", "multi_key"]
    drawn: Any = maps[4].images[0].get_array()
    assert drawn.tolist() == [[0, 0], [1, 1]]
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("output", "answers", "score"),
    [
        ("It is 1234567.", ("1234567",), 1),
        ("1,234,567", ("1234567",), 0),
        ("AbCdE, and fghij", ("ABCDE", "FGHIJ", "KLMNO", "PQRST"), 0.5),
        ("", ("Kofi",), 0),
        ("the doctor is kofi", ("Kofi",), 1),
    ],
)
def test_substring_score(output: str, answers: tuple[str, ...], score: float) -> None:
    assert substring_score(output, answers) == score


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [
        # The last is an example of Newcombe (1998), table I.
        (0, 10, 0.0, 0.2775328),
        (1, 10, 0.7224672, 1.0),
        (0.5, 10, 0.2365931, 0.7634069),
        (81 / 263, 263, 0.2553, 0.3662),
    ],
)
def test_wilson_interval(share: float, count: int, low: float, high: float) -> None:
    assert wilson_interval(share, count) == pytest.approx((low, high), abs=1e-4)
    assert all(math.isnan(bound) for bound in wilson_interval(math.nan, 0))


def test_the_summary_counts_only_what_dense_solves() -> None:
    scores = [(1.0, 1.0), (1.0, 0.5), (0.75, 1.0), (0.0, 0.0), (1.0, 1.0)]
    outcomes = [
        PromptOutcome("multi_value", 2048, 0, 1, 2000, ("1",), {}, {"dense": dense, "x": sparse})
        for dense, sparse in scores
    ]
    dense, x = summarize_retrieval(outcomes, ["dense", "x"])
    assert (dense.accuracy, x.accuracy) == (0.75, 0.7)
    assert (x.prompts, x.dense_solved, x.kept) == (5, 3, 2 / 3)
    assert x.kept_interval == wilson_interval(2 / 3, 3)
    assert x.accuracy_interval == wilson_interval(0.7, 5)
    assert (dense.dense_solved, dense.kept) == (3, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(tasks=["cwe"]), r"tasks must be of \('single', .* got 'cwe'"),
        (dict(tasks=[]), r"tasks must hold at least one value, each once, got \[\]"),
        (dict(lengths=[800, 800]), r"lengths must hold .* each once, got \[800, 800\]"),
        (dict(lengths=[127]), "at least two chunks of 64 tokens for variant 'small', .* got 127"),
        (dict(lengths=[200]), "lengths must be >= 3.. for task 'single', .* got 200"),
        (dict(lengths=[800, 2049]), "lengths must be <= 2048, the longest .* got 2049"),
        (dict(depths=[-1]), "depths must be percentages from 0 to 100, got -1"),
        (dict(depths=[50, 101]), "depths must be percentages from 0 to 100, got 101"),
        (dict(prompts_per_cell=0), "prompts_per_cell must be >= 1, got 0"),
        (dict(question="middle"), r"question must be one of \('last', 'first'\), got 'middle'"),
        (dict(tokenizer=None), "tokenizer must be given"),
    ],
)
def test_wrong_input(
    model: Any, tiny_tokenizer: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _run(model, changes.pop("tokenizer", tiny_tokenizer), **changes)


def test_wrong_texts_variants_and_models(model: Any, tiny_tokenizer: Any) -> None:
    def run(*arguments: Any) -> None:
        evaluate_retrieval(model, *arguments, tokenizer=tiny_tokenizer, lengths=[1400])

    with pytest.raises(ValueError, match="haystack must not be empty text"):
        run(" \n", VARIANTS)
    with pytest.raises(ValueError, match="text must be longer for lengths of 1400 tokens"):
        run(TEXT[:300], VARIANTS)
    with pytest.raises(ValueError, match="variants must not be named 'dense'"):
        run(TEXT, {"dense": SPARSE})
    with (
        h2o_prefill.enable(model, SPARSE),
        pytest.raises(ValueError, match="model must have dense attention"),
    ):
        run(TEXT, VARIANTS)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(NotImplementedError, match="no layer of LlamaForCausalLM can be sparse"):
        run(TEXT, VARIANTS)


def test_it_is_exported() -> None:
    assert h2o_prefill.evaluate_retrieval is evaluate_retrieval
