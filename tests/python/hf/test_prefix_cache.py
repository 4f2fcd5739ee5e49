"""A prompt that begins as a stored one gives what it gives without the store."""

import pytest
import torch
import transformers
from compatibility.tiny_model import build_tiny
from hf_helpers import GREEDY, H2O, RECALL, in_calls, new_cache

from h2o_prefill import ChunkedPrefillCache, PrefixCache, enable
from h2o_prefill.hf.layer import HybridLayer
from h2o_prefill.selection import snapkv

ROOM = 1 << 30


def prefilled(model, ids):
    cache = new_cache(model)
    in_calls(model, cache, ids, (ids.shape[1],))
    return cache


def test_a_prompt_goes_on_from_the_longest_text_that_it_begins_with(llama, make_ids):
    ids = make_ids(1, 120)
    prefixes = PrefixCache(ROOM)
    with enable(llama, **RECALL) as handle:
        for length in (40, 72, 120):
            prefixes.add(prefilled(llama, ids[:, :length]))
        other = ids[:, :72].clone()
        other[:, 30] += 1
        prefixes.add(prefilled(llama, other))
        calls = handle.report().layers[0].sparse_rows
        cache, reused = prefixes.prefill(llama, ids)
        assert cache.get_seq_length() == reused == 72
        assert torch.equal(cache.token_ids, ids[:, :72])
        answer = llama.generate(ids, past_key_values=cache, **GREEDY)
        assert handle.report().layers[0].sparse_rows == calls + 48
        reference = prefilled(llama, ids[:, :72])
        assert torch.equal(answer, llama.generate(ids, past_key_values=reference, **GREEDY))
        # The next turn of a chat.
        prefixes.add(cache)
        turn = torch.cat([answer, ids[:, :20]], dim=1)
        cache, reused = prefixes.prefill(llama, turn)
        assert cache.get_seq_length() == reused == answer.shape[1] - 1
        assert torch.equal(
            llama.generate(turn, past_key_values=cache, **GREEDY),
            llama.generate(turn, past_key_values=reference, **GREEDY),
        )


def test_texts_of_others_are_not_found(build, llama, ids):
    prefixes, longer = PrefixCache(ROOM), torch.cat([ids, ids], dim=1)
    other = build("llama")

    def reused(prompt, model=llama):
        return prefixes.prefill(model, prompt)[1]

    with enable(llama, **RECALL):
        prefixes.add(prefilled(llama, ids))
        assert reused(ids) == 0  # nothing would be left to prefill
        assert reused(longer) == 72
    with enable(llama, **H2O):
        assert reused(longer) == 0
    assert reused(longer) == 0
    with enable(other, **RECALL):
        assert reused(longer, other) == 0
    with enable(llama, **RECALL):
        assert reused(longer) == 72
        prefixes.clear()
        assert prefixes.nbytes == 0
        assert reused(longer) == 0


def test_the_least_recently_used_texts_are_removed(llama, make_ids):
    texts = make_ids(3, 40)
    with enable(llama, **H2O):
        caches = [prefilled(llama, text[None]) for text in texts]
        prefixes = PrefixCache(ROOM)
        prefixes.add(caches[0])
        each = prefixes.nbytes
        prefixes = PrefixCache(2 * each)

        def found(row):
            longer = torch.cat([texts[row], texts[row]])[None]
            return prefixes.prefill(llama, longer[:, :41])[1] == 40

        prefixes.add(caches[0])
        prefixes.add(caches[1])
        prefixes.add(caches[1])
        assert prefixes.nbytes == 2 * each and found(0)
        prefixes.add(caches[2])
        assert [found(row) for row in (0, 2, 1)] == [True, True, False]
        assert 0 < prefixes.nbytes <= prefixes.max_bytes
        none = PrefixCache(0)
        none.add(caches[0])
        assert none.nbytes == 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "FalconH1ForCausalLM"])
def test_a_text_occupies_what_it_needs(build, make_ids, name):
    recurrent = name == "FalconH1ForCausalLM"
    if recurrent and HybridLayer is None:
        pytest.skip(f"transformers {transformers.__version__} has not its layers")
    model = build_tiny(name).model if recurrent else build(name)
    prefixes, needed = PrefixCache(ROOM), 0
    with enable(model, **H2O, select=None if recurrent else snapkv):
        cache = prefilled(model, make_ids(1, 38))
        prefixes.add(cache)
    for layer in cache.layers:
        parts = [{name: x for name, x in vars(layer).items() if name != "_scores"}]
        parts += [vars(layer.state)] if getattr(layer, "state", None) else []
        parts += [getattr(layer, x) for x in ("conv_states", "recurrent_states") if recurrent]
        needed += sum(x.nbytes for part in parts for x in part.values() if torch.is_tensor(x))
    assert 20_000 < prefixes.nbytes < 1.15 * needed


def test_turns_of_a_chat_share_keys_and_values(llama, make_ids):
    ids, prefixes, alone = make_ids(1, 240), PrefixCache(ROOM), PrefixCache(ROOM)
    with enable(llama, **H2O):
        for length in range(24, 241, 24):
            cache, past = prefixes.prefill(llama, ids[:, :length])
            assert cache.get_seq_length() == (past or 16) and past == length - 24
            in_calls(llama, cache, ids[:, past or 16 : length], (24 if past else 8,))
            prefixes.add(cache)
        alone.add(cache)
        # Scores and memory sets are of each turn.
        assert alone.nbytes < prefixes.nbytes < 1.5 * alone.nbytes
        whole = new_cache(llama)
        in_calls(llama, whole, ids[:, :24], (16, 8))
        for length in range(48, 241, 24):
            in_calls(llama, whole, ids[:, length - 24 : length], (24,))
            found, _ = prefixes.prefill(llama, torch.cat([ids[:, :length], ids[:, :1]], dim=1))
            for ours, layer in zip(found.layers, whole.layers, strict=True):
                assert torch.equal(ours.keys, layer.keys) and torch.equal(ours.values, layer.values)


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
                prefixes.add(cache)
                prefixes.clear() if row == 4 else None

        for thread in [spawn(lambda row=row: answer(row)) for row in range(5)]:
            thread.join()
    assert right == [True] * 15


def test_wrong_arguments(llama, ids, make_ids):
    prefixes = PrefixCache(ROOM)
    with pytest.raises(ValueError, match="max_bytes must be >= 0, got -1"):
        PrefixCache(-1)
    with pytest.raises(ValueError, match=r"input_ids must be \[1, T\]"):
        prefixes.prefill(llama, make_ids(2, 5))
    with pytest.raises(ValueError, match="cache must hold one row of known token ids"):
        prefixes.add(new_cache(llama))
    with enable(llama, **H2O):
        with pytest.raises(ValueError, match="cache must hold one row"):
            prefixes.add(prefilled(llama, make_ids(2, 40)))
        cache = new_cache(llama)
        llama(inputs_embeds=llama.get_input_embeddings()(ids), past_key_values=cache)
        with pytest.raises(ValueError, match="of known token ids"):
            prefixes.add(cache)


CHUNK = 16
EXACT_CHUNKS = "exact,chunk_size=16"
CHUNKS = "recommended,chunk_size=16,local_window=4,heavy_budget=4,sink_tokens=2,min_prefill=16"


def kept(model):
    return ChunkedPrefillCache(config=model.config, checkpoints=True)


def in_chunks(model, cache, ids):
    """Prefill in calls of a chunk; the last one takes what is left of a second.

    Products of linear layers depend in their last bits on the number of tokens of a call.
    """
    chunks = max(ids.shape[1] // CHUNK, 1)
    in_calls(model, cache, ids, [*[CHUNK] * (chunks - 1), ids.shape[1] - CHUNK * (chunks - 1)])


def same_state(one, other):
    """Return whether two caches hold the same for later calls."""
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        if not (mine.keys.equal(theirs.keys) and mine.values.equal(theirs.values)):
            return False
        errors = [layer.errors for layer in (mine, theirs) if layer.errors is not None]
        if errors and not torch.equal(*errors):
            return False
    return True


@pytest.mark.parametrize(
    "settings", [CHUNKS, CHUNKS + ",error_threshold=0.01", "h2o,chunk_size=16"]
)
def test_a_cache_goes_back_to_its_checkpoints(llama, make_ids, settings):
    ids, other = make_ids(1, 100), make_ids(1, 40)
    if settings.startswith("h2o"):
        settings += ",local_window=4,heavy_budget=4,sink_tokens=2,min_prefill=16"
    with enable(llama, settings):
        cache = kept(llama)
        in_chunks(llama, cache, ids)
        assert [cache.checkpoint_before(n) for n in (15, 16, 31, 50, 99, 100)] == [
            *(0, 16, 16, 48, 96, 100)
        ]
        llama(ids[:, :1], past_key_values=cache)  # a decoded token
        assert cache.checkpoint_before(101) == 101 and cache.checkpoint_before(99) == 96
        for length in (64, 16):
            cache.crop(length - cache.get_seq_length())
            alone = kept(llama)
            in_chunks(llama, alone, ids[:, :length])
            branch = cache.copy()
            for one in (branch, alone):
                in_chunks(llama, one, other)
            assert same_state(branch, alone)
            assert branch.checkpoint_before(length + 40) == alone.checkpoint_before(length + 40)


def test_without_checkpoints_a_cache_is_exact_at_its_end_alone(llama, make_ids):
    with enable(llama, CHUNKS):
        cache = prefilled(llama, make_ids(1, 100))
        assert [cache.checkpoint_before(n) for n in (16, 99, 100, 1000)] == [0, 0, 100, 100]
    dense = prefilled(llama, make_ids(1, 20))
    with enable(llama, CHUNKS):
        assert dense.checkpoint_before(7) == 7


@pytest.mark.parametrize("least", [16, 40, 64, None])
def test_answers_do_not_depend_on_what_is_stored(llama, make_ids, least):
    """Also where calls take several chunks, or are dense."""
    ids, prefixes = make_ids(1, 150), PrefixCache(ROOM)
    text = CHUNKS.replace("min_prefill=16", f"min_prefill={least}") if least else EXACT_CHUNKS
    reused = 0
    with enable(llama, text):
        for length, parting in ((40, 40), (150, 45), (50, 45), (150, 130), (64, 60), (150, 150)):
            prompt = torch.cat([ids[:, :parting], ids[:, : length - parting]], dim=1)
            alone, _ = PrefixCache(0).prefill(llama, prompt)
            cache, found = prefixes.prefill(llama, prompt)
            if not alone.get_seq_length():
                assert not cache.get_seq_length()
                continue
            assert same_state(cache, alone)
            llama.generate(prompt, past_key_values=cache, **GREEDY)
            prefixes.add(cache)
            reused += found
    assert reused >= 64


def test_with_a_dense_tail_whole_texts_are_reused(llama, make_ids):
    """What follows a tail depends on where the call ended."""
    ids, prefixes = make_ids(1, 150), PrefixCache(ROOM)
    with enable(llama, CHUNKS + ",dense_tail=6"):
        cache, _ = prefixes.prefill(llama, ids[:, :100])
        assert cache.get_seq_length() == 0
        in_calls(llama, cache, ids[:, :100], (100,))
        prefixes.add(cache)
        assert prefixes.prefill(llama, ids)[1] == 100
        assert prefixes.prefill(llama, ids[:, :99])[1] == 0


@pytest.mark.parametrize("settings", [CHUNKS, CHUNKS + ",error_threshold=0.01,dense_layers=1"])
def test_session_files_hold_checkpoints(llama, make_ids, tmp_path, settings):
    ids, other, path = make_ids(1, 100), make_ids(1, 40), tmp_path / "a.session"
    with enable(llama, settings):
        cache = kept(llama)
        in_chunks(llama, cache, ids)
        cache.save(path)
        loaded = ChunkedPrefillCache.load(path, llama)
        again = tmp_path / "b.session"
        loaded.save(again)
        assert again.read_bytes() == path.read_bytes()
        for one in (cache, loaded):
            assert one.checkpoint_before(90) == 80
            one.crop(48 - 100)
            in_chunks(llama, one, other)
        assert same_state(cache, loaded)
        assert loaded.checkpoint_before(87) == 80
        prefixes = PrefixCache(ROOM)
        prefixes.add(ChunkedPrefillCache.load(path, llama))
        assert prefixes.prefill(llama, torch.cat([ids[:, :70], other], dim=1))[1] == 64


def test_checkpoints_of_two_chunk_sizes_are_not_saved(llama, make_ids, tmp_path):
    ids, path = make_ids(1, 96), tmp_path / "a.session"
    cache = kept(llama)
    for length, settings in ((64, CHUNKS), (32, CHUNKS.replace("chunk_size=16", "chunk_size=32"))):
        with enable(llama, settings):
            llama(ids[:, :length], past_key_values=cache)
    assert cache.checkpoint_before(90) == 64
    cache.save(path)
    assert ChunkedPrefillCache.load(path, llama).checkpoint_before(90) == 0
