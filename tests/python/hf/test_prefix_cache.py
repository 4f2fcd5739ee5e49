"""A prompt that begins as a stored one gives what it gives without the store."""

import pytest
import torch
from hf_helpers import GREEDY, H2O, LETTERS, RECALL, in_calls, new_cache

from h2o_prefill import PrefixCache, enable

ROOM = 1 << 30
CHUNK = 16
EXACT_CHUNKS = "exact,chunk_size=16"
CHUNKS = "recommended,chunk_size=16,local_window=4,heavy_budget=4,sink_tokens=2,min_prefill=16"


def check_answers(model, prompts):
    """Assert that a store changes no answer to prompts; return how many tokens each reused."""
    prefixes, reused = PrefixCache(ROOM), []
    for prompt in prompts:
        answers = []
        for store in (prefixes, PrefixCache(0)):
            cache, found = store.prefill(model, prompt)
            reused += [found] * (store is prefixes)
            past = cache.get_seq_length()
            # The cache goes on, past the next chunk.
            calls = prompt.shape[1] - past, 1, 1, 24
            answers.append(
                in_calls(model, cache, torch.cat([prompt[:, past:], prompt[:, :26]], 1), calls)
            )
        assert torch.equal(*answers)
    return reused


# Of a text of random ids: where a prompt leaves it, and its length.
PROMPTS = [(70, 70), (64, 200), (150, 180), (150, 151), (150, 150), (112, 113), (112, 113)]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(("llama", {"min_prefill": least}) for least in (16, 40, 64, "auto")),
        ("llama", {"error_threshold": 0.01}),
        ("llama", {"config": EXACT_CHUNKS}),
        *((name, {}) for name in ("qwen2-window", "gemma3", "deepseek-v3", "gpt2")),
        *((name, {}) for name in ("Lfm2ForCausalLM", "FalconH1ForCausalLM")),
    ],
)
@pytest.mark.parametrize("step", [1, -1])
def test_what_is_stored_never_changes_an_answer(build, make_ids, name, changes, step):
    """Also where calls take several chunks or are dense, and layers keep no more than a window."""
    model, (text, other) = build(name), make_ids(2, 300)
    prompts = [
        torch.cat([text[:left], other[: length - left]])[None] for left, length in PROMPTS[::step]
    ]
    with enable(model, **{"config": CHUNKS, **changes}):
        reused = check_answers(model, prompts)
    assert reused[0] == 0 and all(found % CHUNK == 0 for found in reused)
    assert (max(reused) >= 64) == (name != "FalconH1ForCausalLM")


def test_a_prompt_goes_on_from_its_last_common_chunk(llama, make_ids):
    ids, other = make_ids(2, 300)
    prefixes = PrefixCache(ROOM)
    with enable(llama, **RECALL) as handle:
        prefixes.prefill(llama, ids[None])
        rows = handle.report().layers[0].sparse_rows
        prompt = torch.cat([ids[:250], other[:40]])[None]
        cache, reused = prefixes.prefill(llama, prompt)
        assert reused == 240 and cache.get_seq_length() == 288
        assert torch.equal(cache.token_ids, prompt[:, :288])
        assert handle.report().layers[0].sparse_rows == rows + 48
        assert prefixes.prefill(llama, ids[None, :241])[1] == 240
        assert prefixes.prefill(llama, ids[None, :240])[1] == 224  # a token is left
    with enable(llama, CHUNKS + ",dense_tail=6"):
        # What follows a dense tail depends on where its call ended.
        assert prefixes.prefill(llama, ids[None])[0].get_seq_length() == 0


@pytest.mark.parametrize("change", ["autocast", "settings", "model", "weights", "tokenizer"])
def test_texts_of_others_are_not_found(build, llama, ids, change):
    prefixes, characters = PrefixCache(ROOM), {**RECALL, "recall_characters": 3}

    def reused(model=llama):
        return prefixes.prefill(model, ids)[1]

    def as_before():
        with enable(llama, **characters):
            return reused()

    assert [as_before(), as_before()] == [0, 64]
    model = build("llama") if change == "model" else llama
    changed = H2O if change == "settings" else characters
    if change == "weights":
        llama.model.norm.weight.mul_(1.5)
    dtype = torch.bfloat16 if change == "autocast" else None
    tokenizer = LETTERS if change == "tokenizer" else None
    with enable(model, **changed, tokenizer=tokenizer), torch.autocast("cpu", dtype, bool(dtype)):
        assert [reused(model), reused(model)] == [0, 64]
    assert as_before() == 64
    prefixes.clear()
    assert prefixes.nbytes == as_before() == 0
    assert reused() == 0  # nothing of a model that is not enabled


def test_the_least_recently_used_chunks_are_removed(llama, make_ids):
    texts, prefixes = make_ids(3, 49), PrefixCache(ROOM)

    def found(row):
        return prefixes.prefill(llama, texts[row : row + 1])[1]

    with enable(llama, **H2O):
        found(0)
        each = prefixes.nbytes // 3
        prefixes = PrefixCache(7 * each)
        assert [found(row) for row in (0, 1, 0)] == [0, 0, 48]
        assert prefixes.nbytes == pytest.approx(6 * each, rel=0.1)
        # Of the second text the end alone goes first.
        assert [found(row) for row in (2, 0, 1)] == [0, 48, 16]
        assert 0 < prefixes.nbytes <= prefixes.max_bytes
        prefixes = PrefixCache(0)
        assert [found(0), found(0), prefixes.nbytes] == [0, 0, 0]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_text_occupies_what_it_needs(build, make_ids, name):
    model, prefixes = build(name), PrefixCache(ROOM)
    with enable(model, **H2O):
        cache, _ = prefixes.prefill(model, make_ids(1, 17))
    needed = sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
    assert needed < prefixes.nbytes < 1.1 * needed


def test_threads_share_texts(llama, make_ids, spawn):
    ids, prefixes = make_ids(5, 100), PrefixCache(ROOM)
    ids[:, :48] = ids[:1, :48]
    right = []
    with enable(llama, **RECALL):
        alone = [
            llama.generate(
                row[None], past_key_values=PrefixCache(0).prefill(llama, row[None])[0], **GREEDY
            )
            for row in ids
        ]

        def answer(row):
            prompt = ids[row : row + 1]
            for _ in range(3):
                cache, _ = prefixes.prefill(llama, prompt)
                answer = llama.generate(prompt, past_key_values=cache, **GREEDY)
                right.append(torch.equal(answer, alone[row]))
                prefixes.clear() if row == 4 else None

        for thread in [spawn(lambda row=row: answer(row)) for row in range(5)]:
            thread.join()
    assert right == [True] * 15


def test_wrong_arguments(llama, ids):
    with pytest.raises(ValueError, match="max_bytes must be >= 0, got -1"):
        PrefixCache(-1)
    # test_prefill.py has all else that is wrong with prompts.
    with enable(llama, **H2O), pytest.raises(ValueError, match=r"must be \[1, T\], got \[2, 72\]"):
        PrefixCache(ROOM).prefill(llama, ids.repeat(2, 1))


def test_without_checkpoints_a_cache_is_exact_at_its_end_alone(llama, make_ids):
    with enable(llama, CHUNKS):
        cache = new_cache(llama)
        llama(make_ids(1, 100), past_key_values=cache)
        assert [cache.checkpoint_before(n) for n in (16, 99, 100, 1000)] == [0, 0, 100, 100]
    dense = new_cache(llama)
    llama(make_ids(1, 20), past_key_values=dense)
    with enable(llama, CHUNKS):
        assert dense.checkpoint_before(7) == 7
