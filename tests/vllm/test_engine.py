"""The plugin in one engine: settings by request, against transformers and against itself."""

import pytest
import torch
from engines import CHUNK, OPTIONS, SETTINGS
from transformers import AutoTokenizer, LlamaForCausalLM

from h2o_prefill import enable

LENGTH, PAGE = 7 * CHUNK + 45, OPTIONS["block_size"]
RECOMMENDED = f"recommended,chunk_size={CHUNK},local_window=16,heavy_budget=16,min_prefill=none"
ASKED = {"dense": "dense", "exact": "exact", "h2o": None, "recommended": RECOMMENDED}


@pytest.fixture(scope="module")
def engine(make_engine, folder, device):
    made = make_engine(folder, skip_tokenizer_init=False)
    layers = made.llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    assert {type(layer.impl).__module__ for layer in layers} == {f"h2o_prefill.vllm.{device}"}
    return made


@pytest.fixture(scope="module")
def model(folder):
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def losses_of(model, ids):
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")


@pytest.mark.parametrize("name", ASKED)
def test_losses_and_answers_are_those_of_transformers(engine, model, folder, tokens, name):
    ids = tokens(LENGTH)
    answer = engine.ask(ids, settings=ASKED[name], new=8, losses=True)
    settings = ASKED[name] or SETTINGS
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with enable(model, "exact" if name == "dense" else settings, tokenizer=tokenizer):
        expected = losses_of(model, ids)
        greedy = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, LENGTH:]
    distance = (losses_of(model, ids) - expected).abs().mean()
    assert distance < 1e-4 if name in ("dense", "exact") else distance > 0.05
    assert abs(answer.losses.mean() - expected.mean()) < 0.002
    torch.testing.assert_close(answer.losses, expected, atol=2e-3, rtol=1e-3)
    assert answer.tokens == greedy.tolist()


@pytest.mark.parametrize("settings", [None, RECOMMENDED, "exact"])
def test_a_prefix_that_is_found_changes_nothing(engine, tokens, settings):
    shared = tokens(4 * CHUNK + 70, 20)
    first, later, inside = (shared + tokens(n, n) for n in (CHUNK + 11, CHUNK + 12, 40))
    engine.ask(first, settings=settings)
    # The rows of a prompt's last chunk need the state at its begin, all others that before them.
    pages, chunks = 4 * CHUNK + 2 * PAGE, 4 * CHUNK
    cases = [(later, pages if settings == "exact" else chunks), (inside, pages)]
    cases.append((later, len(later) // PAGE * PAGE))
    found = []
    for ids, cached in cases:
        answer, counted = engine.counted(ids, settings=settings)
        found.append(answer)
        assert answer.cached == cached
        if settings != "exact":
            assert counted == {"state_hits": 1, "sparse_tokens": len(ids) - cached}
    for (ids, cached), answer in zip(cases, found, strict=True):
        engine.forget()
        alone = engine.ask(ids, settings=settings)
        assert alone.cached == 0 and answer.tokens == alone.tokens
        # vLLM's linear layers sum other numbers of rows otherwise.
        close = 1e-4 if cached % CHUNK else 0
        torch.testing.assert_close(answer.logprobs, alone.logprobs, atol=close, rtol=close)


def test_pages_are_shared_by_equal_settings_and_salts_alone(engine, tokens):
    ids = tokens(LENGTH, 25)
    whole = LENGTH // PAGE * PAGE
    for settings, salt, cached in [
        ("exact", None, 0),
        (None, None, 0),
        (SETTINGS, None, whole),
        (RECOMMENDED, None, 0),
        (None, "mine", 0),
        (None, "mine", whole),
        ("exact", None, whole),
    ]:
        assert engine.ask(ids, settings=settings, salt=salt).cached == cached
    engine.forget()
