"""The plugin in one engine: settings by request, against transformers and against itself."""

import pytest
import torch
from engines import CHUNK, SETTINGS
from transformers import AutoTokenizer, LlamaForCausalLM
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from h2o_prefill import enable

LENGTH = 7 * CHUNK + 45
RECOMMENDED = f"recommended,chunk_size={CHUNK},local_window=16,heavy_budget=16"
ASKED = {"dense": "dense", "exact": "exact", "h2o": None, "recommended": RECOMMENDED}


@pytest.fixture(scope="module")
def engine(make_engine, folder):
    return make_engine(folder, skip_tokenizer_init=False)


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


def test_settings_of_a_request_count_as_they_should(engine, tokens):
    ids = tokens(LENGTH, 1)
    expected = {
        "dense": {},
        "exact": {"exact_tokens": LENGTH % CHUNK},  # the pages of a lossless prompt are shared
        "h2o": {"sparse_tokens": LENGTH},
        "recommended": {"sparse_tokens": LENGTH},
    }
    for name, settings in ASKED.items():
        assert engine.counted(ids, settings=settings, salt="x")[1] == expected[name]
    _, counted = engine.counted(tokens(CHUNK - 1, 2))
    assert counted == {}
    engine.forget()


def test_a_batch_gives_what_its_requests_give_alone(engine, tokens):
    lengths = [LENGTH, 3 * CHUNK, 40, 2 * CHUNK + 1, CHUNK]
    prompts = [tokens(length, 10 + i) for i, length in enumerate(lengths)]
    settings = [None, RECOMMENDED, None, "exact", "dense"]
    alone = [engine.ask(x, settings=y, new=8) for x, y in zip(prompts, settings, strict=True)]
    engine.forget()
    for one, other in zip(alone, engine.ask(*prompts, settings=settings, new=8), strict=True):
        assert one.tokens == other.tokens
        # Rows of other requests change how the products of vLLM's linear layers are summed.
        torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("settings", [None, RECOMMENDED, "exact"])
def test_a_prefix_that_is_found_changes_nothing(engine, tokens, settings):
    shared = tokens(4 * CHUNK + 70, 20)
    first, second = (shared + tokens(CHUNK + 11, seed) for seed in (21, 22))
    engine.ask(first, settings=settings)
    found, counted = engine.counted(second, settings=settings)
    assert found.cached == 4 * CHUNK
    if settings != "exact":
        assert counted == {"state_hits": 1, "sparse_tokens": len(second) - 4 * CHUNK}
    again = engine.ask(second, settings=settings)
    assert again.cached == len(second) // CHUNK * CHUNK
    engine.forget()
    alone = engine.ask(second, settings=settings)
    assert alone.cached == 0
    for other in (found, again):
        assert other.tokens == alone.tokens and other.logprobs.equal(alone.logprobs)


def test_pages_are_shared_by_equal_settings_and_salts_alone(engine, tokens):
    ids = tokens(LENGTH, 25)
    whole = LENGTH // CHUNK * CHUNK
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


def test_without_its_state_a_prefix_is_followed_densely(engine, tokens):
    shared = tokens(4 * CHUNK, 40)
    first, second = (shared + tokens(3 * CHUNK + 9, seed) for seed in (41, 42))
    engine.ask(first)
    kept = engine.planner.checkpoints.max_bytes
    engine.planner.checkpoints.max_bytes = 0
    lost, counted = engine.counted(second)
    engine.planner.checkpoints.max_bytes = kept
    assert lost.cached == 4 * CHUNK
    assert counted == {"state_misses": 1, "lost_tokens": len(second) - 4 * CHUNK}
    engine.forget()


def test_settings_that_are_not_known_are_refused_at_once(engine, tokens):
    ids = tokens(LENGTH, 50)
    for wrong, message in {
        "fast": "h2o_prefill: preset must be one of",
        "h2o,chunk_size=64": "h2o_prefill: chunk_size must be 128, as of this engine, got 64",
        f"{SETTINGS},wide=1.2x2": "h2o_prefill: wide must name layers < 3 and KV heads < 2",
        3: "h2o_prefill: settings must be a text",
    }.items():
        with pytest.raises(VLLMValidationError, match=message):
            engine.ask(ids, settings=wrong)
    assert len(engine.ask(ids).tokens) == 4
    engine.forget()


def test_aborted_requests_leave_nothing(engine, tokens):
    core, held = engine.llm.llm_engine, set()
    for i in range(20):
        asked = {"prompt_token_ids": tokens(LENGTH, 200 + i)}
        core.add_request(str(i), asked, SamplingParams(max_tokens=50, detokenize=False))
        core.step()
        held.add(len(engine.planner))
    assert max(held) > 0
    core.abort_request([str(i) for i in range(20)])
    engine.ask(tokens(10))
    assert len(engine.planner) == 0
    assert engine.planner.checkpoints.nbytes <= engine.planner.checkpoints.max_bytes
