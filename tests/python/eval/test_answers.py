"""Answers after dense and after sparse prefill: prompts, what is compared, the report."""

from __future__ import annotations

import json
from typing import Any

import pytest

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import compare_answers, load_text
from h2o_prefill.eval.answers import answers_report
from h2o_prefill.eval.inputs.text import Corpus
from h2o_prefill.eval.report import format_json
from h2o_prefill.presets import PRESETS

FOXES = Corpus("foxes", "A quick brown fox did jump over it. " * 50, "foxes.txt")
SPHINX = Corpus("sphinx", "Sphinx of black quartz, judge my vow. " * 40, "sphinx.txt")
EXACT = {"chunk_size": 64, "local_window": 256, "heavy_budget": 256}
SMALL = PrefillConfig(chunk_size=64, local_window=4, heavy_budget=4)

pytestmark = pytest.mark.filterwarnings("ignore:the memory set")


@pytest.fixture
def model(tiny: Any) -> Any:
    return tiny.make_model(max_position_embeddings=1024)


def _compare(model: Any, tokenizer: Any, **changes: Any) -> Any:
    settings: dict[str, Any] = dict(prompts=5, prompt_tokens=300, new_tokens=6, question="And?")
    variants = {"exact": PrefillConfig(**EXACT), "small": SMALL}
    chosen = {**settings, **changes}
    return compare_answers(model, [FOXES, SPHINX], variants, tokenizer=tokenizer, **chosen)


def test_answers_are_compared_token_by_token(model: Any, tiny_tokenizer: Any) -> None:
    steps: list[tuple[int, int, str]] = []
    result = _compare(model, tiny_tokenizer, on_progress=lambda *step: steps.append(step))
    for prompt in result.prompts:
        assert prompt.answers["exact"].text == prompt.dense and prompt.dense_tokens == 6
        answer = prompt.answers["small"]
        # The most likely token of the dense run is no less likely than another one.
        assert (answer.parts_at is None) == (answer.gap is None)
        assert answer.parts_at is None or (0 <= answer.parts_at < 6 and answer.gap > 0)
    apart = [p.answers["small"].parts_at for p in result.prompts]
    small = result.summary()["small"]
    assert small["parting_tokens"] == sorted(p for p in apart if p is not None) != []
    assert len(small["gaps"]) == 5 - small["equal"]

    # Pieces are spread over each text, and the texts take turns.
    where = [(prompt.source, prompt.begin) for prompt in result.prompts]
    assert where == [("foxes", 0), ("sphinx", 0), ("foxes", 750), ("sphinx", 1220), ("foxes", 1500)]
    assert {prompt.prompt_tokens for prompt in result.prompts} == {300 + len("\n\nAnd?")}
    assert [step[0] for step in steps] == list(range(16)) and {step[1] for step in steps} == {15}
    assert steps[5][2] == "prompt 2 small"

    report = json.loads(format_json(answers_report(result, model="tiny")))
    nothing: list[float] = []
    expected = {"equal": 5, "prompts": 5, "parting_tokens": nothing, "gaps": nothing}
    assert report["summary"]["exact"] == expected
    assert report["config"]["text_sources"] == ["foxes.txt", "sphinx.txt"]
    assert report["config"]["variants"]["small"]["heavy_budget"] == 4
    assert len(report["prompts"]) == 5 and report["config"]["model"] == "tiny"


def test_an_empty_question_continues_the_text(model: Any, tiny_tokenizer: Any) -> None:
    (prompt,) = _compare(model, tiny_tokenizer, prompts=1, question="").prompts
    ids = tiny_tokenizer(FOXES.text, return_tensors="pt")["input_ids"][:, :300]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, 300:]
    assert prompt.prompt_tokens == 300
    assert prompt.dense == tiny_tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.model
@pytest.mark.slow
def test_answers_of_the_real_model(smollm2: Any) -> None:
    model, tokenizer = smollm2
    exact = PrefillConfig(local_window=2048, heavy_budget=512)
    variants = {"exact": exact, "recommended": PRESETS["recommended"]}
    numbers = {"prompts": 1, "prompt_tokens": 2400, "new_tokens": 8}
    result = compare_answers(model, [load_text("pydoc")], variants, tokenizer=tokenizer, **numbers)
    assert len(result.prompts[0].dense.split()) >= 4
    # Rounding may decide between two tokens that are equally likely, and nothing else.
    summary = result.summary()
    assert all(gap < 1e-3 for gap in summary["exact"]["gaps"])
    assert all(gap < 1.5 for gap in summary["recommended"]["gaps"])
