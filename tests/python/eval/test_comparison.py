"""What sparse prefill brings on one prompt: measured rightly, and the model stays as it was."""

import pytest
import torch

import h2o_prefill
from h2o_prefill import compare
from h2o_prefill.eval import evaluate_perplexity, observe
from h2o_prefill.eval.comparison import ComparedRun, Comparison
from h2o_prefill.eval.forward import PromptForward
from h2o_prefill.hf.kinds import enabled_of

NAMES = ["sdpa, model's own", "exact, lossless"]


@pytest.fixture
def ids():
    return torch.randint(0, 257, (64,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def prefills(monkeypatch):
    """The settings of every timed prefill; each takes a second more than the one before."""
    found = []

    def prefill(self, input_ids):
        enabled, name = enabled_of(self._model.config), self._model.config._attn_implementation
        settings = None if enabled is None else enabled.config.to_string()
        found.append("no attention" if name == observe.NAME else settings)
        return float(len(found))

    monkeypatch.setattr(PromptForward, "prefill", prefill)
    return found


def test_runs_take_turns_and_agree_with_the_evaluation(
    tiny_model, tiny_tokenizer, small_config, ids, prefills
):
    steps = []
    tiny_model.train()
    tiny_model.model.layers[0].eval()
    tiny_model.generation_config.return_dict_in_generate = True
    result = compare(
        tiny_model,
        {"input_ids": ids[None], "attention_mask": torch.ones(1, 64)},
        tokenizer=tiny_tokenizer,
        config=small_config,
        max_new_tokens=5,
        on_progress=lambda done, total, what: steps.append((done, total)),
    )
    assert enabled_of(tiny_model.config) is None
    layer = set(tiny_model.model.layers[0].modules())
    assert all(module.training == (module not in layer) for module in tiny_model.modules())
    tiny_model.generation_config.return_dict_in_generate = False
    assert prefills == [None, "exact", small_config.to_string(), "no attention"] * 3
    assert steps == [(done, 18) for done in range(19)]
    own, exact, sparse = result.runs
    assert [run.name for run in result.runs] == [*NAMES, small_config.to_string()]
    assert [run.seconds for run in result.runs] == [5.0, 6.0, 7.0]
    assert sparse.all_seconds == (3.0, 7.0, 11.0) and sparse.speedup == pytest.approx(5 / 7)
    assert result.seconds_without_attention == 8.0 and result.attention_share == 0.0
    assert (own.kl_mean, own.delta_percent, own.speedup, own.settings) == (0.0, 0.0, 1.0, "")
    assert abs(exact.kl_mean) < 1e-6 and abs(exact.delta_percent) < 1e-3
    expected = evaluate_perplexity(tiny_model, ids, small_config, context=64, windows="0:1")
    assert sparse.kl_mean == pytest.approx(expected.kl_mean, rel=1e-5) and sparse.kl_mean > 1e-3
    assert sparse.delta_percent == pytest.approx(expected.delta_percent, rel=1e-4)
    with h2o_prefill.enable(tiny_model.eval(), small_config):
        made = tiny_model.generate(ids[None], max_new_tokens=5, do_sample=False)[0, 64:]
    assert sparse.answer == tiny_tokenizer.decode(made, skip_special_tokens=True)

    shown = str(result).splitlines()
    assert shown[0].startswith("64 tokens") and len(shown) == 6 and "%" not in shown[2]
    row = "7.00", "0.71x", f"{sparse.kl_mean:.4f}", f"{sparse.delta_percent:+.2f}"
    assert shown[2].split()[3:5] == ["5.00", "1.00x"] and tuple(shown[4].split()[1:5]) == row


def test_the_share_of_attention_bounds_what_sparsity_gains(tiny_model, ids):
    exact = ComparedRun("exact, lossless", "exact", 8.0, (8.0,), 1.0, 0.0, 0.0, 0.0, "")
    result = Comparison(64, (exact,), 2.0)
    assert str(result).endswith(
        "attention takes 75% of exact, so sparsity gains at most 4.00x over it"
    )
    with torch.no_grad():
        before = tiny_model(ids[None]).logits
        with observe.without_attention(tiny_model):
            bare = tiny_model(ids[None]).logits
        # Without attention a token's logits depend on this token alone.
        assert torch.equal(bare[0, ids == ids[0]], bare[:1, 0].expand((ids == ids[0]).sum(), -1))
        assert not torch.equal(bare, before) and torch.equal(tiny_model(ids[None]).logits, before)


def test_ids_and_texts_are_prompts(tiny_model, tiny_tokenizer, small_config, prefills):
    text = "Sphinx of black quartz, judge my vow."
    ids = tiny_tokenizer(text, verbose=False)["input_ids"]
    given = {"config": small_config, "max_new_tokens": 2, "repeats": 1}
    by_text = compare(tiny_model, text, tokenizer=tiny_tokenizer, **given)
    by_ids = compare(tiny_model, ids, **given)
    changes = [[(run.kl_mean, run.delta_percent) for run in x.runs] for x in (by_text, by_ids)]
    assert changes[0] == changes[1]
    answers = [x.runs[-1].answer for x in (by_text, by_ids)]
    assert answers[0] == tiny_tokenizer.decode([int(token) for token in answers[1].split()])
    lossless = compare(tiny_model, ids, **{**given, "config": "exact"})
    assert [run.name for run in lossless.runs] == NAMES


@pytest.mark.parametrize("fails", [False, True])
def test_an_enabled_model_is_measured_with_its_settings_and_stays_as_it_was(
    tiny_model, small_config, ids, fails
):
    def stop(done, *_):
        if fails and done == 5:
            raise KeyboardInterrupt

    with h2o_prefill.enable(tiny_model, small_config) as handle:
        with torch.no_grad():
            before = tiny_model(ids[None]).logits
        state, report = handle.state, h2o_prefill.explain(tiny_model)
        try:
            result = compare(tiny_model, ids, max_new_tokens=1, repeats=1, on_progress=stop)
        except KeyboardInterrupt:
            assert fails
        assert handle.active and handle.state is state
        assert h2o_prefill.explain(tiny_model) == report
        with torch.no_grad():
            assert torch.equal(tiny_model(ids[None]).logits, before)
    assert tiny_model.config._attn_implementation == "sdpa"
    if not fails:
        given = {"context": 64, "windows": "0:1"}
        expected = evaluate_perplexity(tiny_model, ids, small_config, **given)
        assert result.runs[-1].name == small_config.to_string()
        assert result.runs[-1].kl_mean == pytest.approx(expected.kl_mean, rel=1e-5)
