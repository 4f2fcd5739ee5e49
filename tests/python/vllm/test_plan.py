"""What an engine's steps leave to this library, on plain tensors in the place of an engine."""

import multiprocessing
import os
import random
from types import SimpleNamespace

import pytest
import torch
from op_testing import NoWaits, in_pages

from h2o_prefill import PrefillConfig, ops
from h2o_prefill.state import LayerState, estimated_kl, no_errors
from h2o_prefill.vllm.counters import Counters, read, shared_path
from h2o_prefill.vllm.plan import Choice, Planner, Prompt, Rules, choice_of, is_too_short
from h2o_prefill.vllm.state import Checkpoints, PromptState

CHUNK, LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 32, 2, 4, 2, 16, 40
SIZES = f"chunk_size={CHUNK},local_window=6,heavy_budget=5,sink_tokens=1"
SPARSE = {
    "h2o": f"h2o,{SIZES}",
    "recommended": f"recommended,{SIZES},recall=3,error_threshold=0.02",
    "layers": f"h2o,{SIZES},dense_layers=0",
}
DRAWN = torch.Generator().manual_seed(0)
# Queries, keys and values of a layer are sums of a token's and a position's.
OF_TOKEN, OF_POSITION = (
    [
        [torch.randn(rows, heads, DIM, generator=DRAWN) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        for _ in range(LAYERS)
    ]
    for rows in (VOCABULARY, 1000)
)
SCALE = DIM**-0.5


def tokens_of(length, seed=0):
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def rows_of(tokens, layer, dtype=torch.float32):
    """Return queries, keys and values [1, heads, T, D] of a prompt."""
    tables = zip(OF_TOKEN[layer], OF_POSITION[layer], strict=True)
    rows = (token[list(tokens)] + position[: len(tokens)] for token, position in tables)
    return [x.to(dtype).transpose(0, 1)[None] for x in rows]


def make_planner(settings="h2o", max_bytes=1 << 30):
    return Planner(Rules(SPARSE.get(settings, settings)), Checkpoints(max_bytes), Counters())


def make_prompt(planner, tokens, request="a", settings=None, **fields):
    return Prompt(request, tokens, planner.rules.choice(settings), **fields)


def step(planner, *batch, tokens=None):
    """Run a step; return the outputs [layers, T, Hq, D] of the requests, None of the engine's."""
    planned = planner.plan(batch)
    outputs = [None] * len(batch)
    for row in planned:
        prompt, past, total = batch[row.index]
        outputs[row.index] = out = torch.full((LAYERS, total - past, HEADS, DIM), torch.nan)
        for layer in range(LAYERS):
            q, k, v = rows_of((tokens or prompt.tokens)[:total], layer)
            rows = q[:, :, past:], *in_pages(k, v, size=16), SCALE, out[layer].transpose(0, 1)[None]
            with NoWaits():
                row.attend(layer, *rows)
    return outputs


def run(planner, prompt, ends, past=0):
    """Return the outputs of a prompt whose steps end there."""
    outputs = []
    for end in ends:
        outputs += step(planner, (prompt, past, end))
        past = end
    return torch.cat(outputs, dim=1)


def whole(tokens, settings):
    """Return the outputs of one call of the operator, and the errors of its layers."""
    config = PrefillConfig.parse(SPARSE.get(settings, settings)).replace(min_prefill=1)
    outputs, errors = [], []
    for layer in range(LAYERS):
        lists = (None,) * 3
        if config.recall:
            lists = ops.lexical_recall(torch.tensor([tokens]), 0, config)
        state, options = LayerState(), (layer, config.to_string(), SCALE, None, 0.0, *lists)
        out = state.attend_history(*rows_of(tokens, layer), *options)
        outputs.append(out[0].transpose(0, 1))
        errors.append(no_errors(out) if state.errors is None else state.errors)
    return torch.stack(outputs), errors


def is_whole(outputs, expected, settings):
    """Return whether outputs equal one call's: dense layers multiply other blocks there."""
    dense = LAYERS if settings == "exact" else 1 if settings == "layers" else 0
    torch.testing.assert_close(outputs[:dense], expected[:dense])
    return outputs[dense:].equal(expected[dense:])


@pytest.mark.parametrize("settings", [*SPARSE, "exact"])
@pytest.mark.parametrize("length", [5 * CHUNK, 4 * CHUNK + 1, 4 * CHUNK + 19, CHUNK])
def test_steps_give_what_one_call_gives(settings, length):
    expected, errors = whole(tokens_of(length), settings)
    found = []
    for ends in ([length], [*range(CHUNK, length, CHUNK), length], [2 * CHUNK, length]):
        planner = make_planner(settings)
        planner.rules.chunk_size = CHUNK
        prompt = make_prompt(planner, tokens_of(length))
        found.append(run(planner, prompt, [end for end in ends if end <= length]))
        planner.forget(prompt.request)
        if planner.rules.default.config.error_rows and length > CHUNK:
            kl = float(estimated_kl(errors, planner.rules.default.config))
            assert planner.counters["estimated_kl"] == pytest.approx(kl)
        assert len(planner) == 0
    assert is_whole(found[0], expected, settings)
    assert found[1].equal(found[0]) and found[2].equal(found[0])


def test_a_batch_gives_what_its_requests_give_alone():
    planner = make_planner("recommended")
    lengths = [3 * CHUNK + 7, 10, 2 * CHUNK, 2 * CHUNK + 3, 3 * CHUNK]
    asked = [None, None, "exact", "dense", SPARSE["h2o"]]
    prompts = [
        make_prompt(planner, tokens_of(length, i), str(i), settings)
        for i, (length, settings) in enumerate(zip(lengths, asked, strict=True))
    ]
    ends = [[min(2 * CHUNK, x), x] for x in lengths]
    first = step(planner, *((p, 0, end[0]) for p, end in zip(prompts, ends, strict=True)))
    assert [x is not None for x in first] == [True, False, True, False, True]
    second = step(planner, (prompts[4], *ends[4]), (prompts[0], *ends[0]))
    for i, last in (0, second[1]), (4, second[0]):
        alone = run(make_planner("recommended"), prompts[i], ends[i])
        assert torch.cat([first[i], last], dim=1).equal(alone)
    counted = {kind: planner.counters[f"{kind}_tokens"] for kind in ("sparse", "exact", "lost")}
    assert counted == {"sparse": lengths[0] + lengths[4], "exact": lengths[2], "lost": 0}


@pytest.mark.parametrize("settings", SPARSE)
def test_prefixes_give_what_prompts_from_nothing_give(settings):
    drawn = random.Random(1)
    planner = make_planner(settings)
    texts, inside = [tokens_of(4 * CHUNK + 5)], []
    run(planner, make_prompt(planner, texts[0], "first"), [len(texts[0])])
    for i in range(12):
        shared = drawn.choice(texts)
        known = drawn.randrange(CHUNK, len(shared))
        texts.append(shared[:known] + tokens_of(1 + drawn.randrange(2 * CHUNK), seed=i + 1))
        prompt = make_prompt(planner, texts[-1], str(i))
        known = planner.rules.end_of_hit(prompt.choice, known, len(texts[-1]))
        found = run(planner, prompt, [len(texts[-1])], past=known)
        assert is_whole(found, whole(texts[-1], settings)[0][:, known:], settings)
        inside.append(known % CHUNK > 0)
    assert 3 < sum(inside) < 9
    assert planner.counters["state_hits"] == 12 and planner.counters["state_misses"] == 0


def test_a_prefix_is_found_in_the_step_that_computes_it():
    planner = make_planner()
    text = tokens_of(4 * CHUNK)
    one, other = (make_prompt(planner, text, request) for request in "ab")
    later, first = step(planner, (other, 2 * CHUNK, 4 * CHUNK), (one, 0, 3 * CHUNK))
    expected, _ = whole(text, "h2o")
    assert first.equal(expected[:, : 3 * CHUNK]) and later.equal(expected[:, 2 * CHUNK :])


@pytest.mark.parametrize("past", [2 * CHUNK, 2 * CHUNK + 5])
def test_without_a_state_a_prompt_is_dense_to_its_end(past):
    planner = make_planner(max_bytes=0)
    text = tokens_of(5 * CHUNK)
    run(planner, make_prompt(planner, text), [2 * CHUNK])
    found = run(planner, make_prompt(planner, text, "b"), [3 * CHUNK, 5 * CHUNK], past=past)
    for layer in range(LAYERS):
        expected = ops.dense_attention(*rows_of(text, layer), SCALE)[0].transpose(0, 1)
        torch.testing.assert_close(found[layer], expected[past:])
    assert planner.counters["state_misses"] == 1 and planner.counters["state_hits"] == 0
    assert planner.counters["lost_tokens"] == 5 * CHUNK - past
    assert planner.counters["checkpoint_bytes"] == len(planner.checkpoints) == 0


def test_rows_that_attend_densely_and_short_ones_may_stay_the_engines():
    rules, text = Rules(SPARSE["recommended"], takes_dense=False), tokens_of(3 * CHUNK + 2)
    planner = Planner(rules, Checkpoints(0), Counters(), decoded=2)
    assert not rules.takes(rules.choice("exact"), len(text))
    prompt, expected = make_prompt(planner, text), whole(text, "recommended")[0]
    assert run(planner, prompt, [CHUNK, 3 * CHUNK]).equal(expected[:, : 3 * CHUNK])
    assert step(planner, (prompt, 3 * CHUNK, len(text))) == [None]
    assert not planner.is_idle([1])
    assert step(planner, (prompt, len(text), len(text) + 1)) == [None]
    assert planner.counters["estimated_kl"] > 0 and planner.is_idle([1, 2])
    assert step(planner, (make_prompt(planner, text, "b"), CHUNK, 3 * CHUNK)) == [None]
    assert planner.counters["lost_tokens"] == 2 * CHUNK and not planner.is_idle([3])


def test_a_preempted_request_goes_on_from_a_checkpoint_and_prefills_its_answer_densely():
    planner = make_planner()
    text, answer = tokens_of(3 * CHUNK + 9), tokens_of(CHUNK, seed=5)
    prompt = make_prompt(planner, text)
    expected = run(planner, prompt, [CHUNK, len(text)])
    assert step(planner, (prompt, len(text), len(text) + 1)) == [None]
    for past in (0, CHUNK, 3 * CHUNK):
        total = len(text) + len(answer)
        (found,) = step(planner, (prompt, past, total), tokens=text + answer)
        assert found[:, : len(text) - past].equal(expected[:, past:])
        for layer in range(LAYERS):
            dense = ops.dense_attention(*rows_of(text + answer, layer), SCALE)[0].transpose(0, 1)
            torch.testing.assert_close(found[layer, len(text) - past :], dense[len(text) :])
        planner.forget(prompt.request)


def test_steps_end_at_chunks():
    rules = Rules(SPARSE["h2o"])
    cases = {
        (0, 100, 200): 96,
        (64, 90, 200): 64,  # no room: the request waits
        (64, 200, 200): 200,
        (64, 210, 200): 210,  # with tokens that were decoded
        (200, 201, 200): 201,
        (40, 70, 200): 64,  # a step that another scheduler had cut
    }
    for (past, total, length), end in cases.items():
        assert rules.end_of_step(past, total, length) == end
    assert list(rules.cut(20, 110, 80)) == [(20, 32), (32, 80), (80, 110)]
    assert list(rules.cut(32, 40, 80)) == [(32, 40)]


def test_settings_of_requests():
    rules = Rules(SPARSE["h2o"])
    assert rules.choice() is rules.default and rules.default.is_sparse
    assert rules.choice("dense") == Choice(None)
    for lossless in ("dense", "exact", "exact,chunk_size=64"):
        assert rules.choice(lossless).text == "" and not rules.choice(lossless).is_sparse
    assert rules.choice(SPARSE["h2o"]).text != rules.choice(SPARSE["recommended"]).text
    for wrong, message in {
        "fast": "preset",
        f"h2o,{SIZES},hevy=1": "hevy",
        "h2o": "chunk_size must be 32, as of this engine, got 1024",
        f"h2o,{SIZES},min_prefill=64": "min_prefill is not for engines",
        f"h2o,{SIZES},dense_tail=4": "dense_tail must be 0",
        7: "settings must be a text like 'recommended', got 7",
    }.items():
        with pytest.raises(ValueError, match=message) as raised:
            rules.choice(wrong)
        assert "\n" not in str(raised.value)
    config = rules.choice(f"h2o,{SIZES},dense_layers=2").config
    config.check_fits(3)
    with pytest.raises(ValueError, match=r"layers of dense_layers must be < 2, got"):
        config.check_fits(2)
    assert Rules("exact").chunk_size == Rules("dense").chunk_size == 1024
    assert not rules.takes(rules.default, CHUNK - 1) and rules.takes(rules.default, CHUNK)


def test_keys_tell_apart_whatever_states_depend_on():
    planner = make_planner()
    text = tokens_of(3 * CHUNK)
    prompts = [
        make_prompt(planner, text),
        make_prompt(planner, text, settings=SPARSE["recommended"]),
        make_prompt(planner, text, owner="adapter"),
        make_prompt(planner, text, images=[(CHUNK + 3, "cat")]),
        make_prompt(planner, text, images=[(CHUNK + 3, "dog")]),
        make_prompt(planner, [1 - text[0], *text[1:]]),
    ]
    keys = [prompt.key(2 * CHUNK, CHUNK) for prompt in prompts]
    assert len(set(keys)) == len(prompts)
    same = make_prompt(planner, [*text, 1, 2], "b", images=[(3 * CHUNK, "cat")])
    assert same.key(2 * CHUNK, CHUNK) == keys[0]
    # An image counts from its first token on.
    assert prompts[3].key(CHUNK, CHUNK) == prompts[0].key(CHUNK, CHUNK)


def test_states_stay_below_a_number_of_bytes():
    planner = make_planner()
    run(planner, make_prompt(planner, tokens_of(2 * CHUNK)), [2 * CHUNK])
    planner.plan([])
    one = planner.checkpoints.nbytes // 2
    assert one > 0 and one * 2 == planner.counters["checkpoint_bytes"]
    bounded = make_planner(max_bytes=5 * one)
    for seed in range(200):
        prompt = make_prompt(bounded, tokens_of(2 * CHUNK, seed), str(seed))
        if seed % 3:
            run(bounded, prompt, [2 * CHUNK])
        else:
            step(bounded, (prompt, 0, CHUNK))  # a client that leaves
        bounded.forget(str(seed))
        assert len(bounded.checkpoints) <= 5 + 2 and len(bounded) == 0
        assert bounded.checkpoints.nbytes <= 5 * one
    with pytest.raises(ValueError, match="max_bytes must be >= 0, got -1"):
        Checkpoints(-1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_copies_of_a_device_are_trimmed_when_they_have_ended(monkeypatch, ranks):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)  # needs a device
    ended, waited = [], []
    copied = SimpleNamespace(query=lambda: bool(ended), wait=lambda: waited.append(1))
    memory = torch.tensor([[[0, 5, -1, -1], [2, -1, -1, -1]]], dtype=torch.int32)
    tensors, checkpoints = (memory, memory.float(), torch.zeros(1, 2, 4)), Checkpoints(1000, ranks)
    state = PromptState(PrefillConfig(), CHUNK, layers={0: tensors}, copied=copied)
    checkpoints.put(b"key", state)
    checkpoints.settle()
    assert state.layers[0] is tensors and checkpoints.nbytes == 96
    assert state.at(0, torch.device("meta"))[0].is_meta and waited == [1]
    assert state.at(0, torch.device("cpu")) is tensors and state.at(1, memory.device) is None
    ended.append(1)
    checkpoints.settle()
    assert state.layers[0][0].equal(memory[:, :, :2]) and state.copied is None
    # All ranks of a model remove the same states, whatever the sizes of their own sets.
    assert checkpoints.nbytes == (64 if ranks == 1 else 96)


def test_counters_are_summed_over_the_processes_of_an_engine(monkeypatch, tmp_path):
    # Inherited from a server that has ended, and from a program that this process was.
    with (tmp_path / "log").open("w") as other:
        for inherited in (f"/proc/{os.getpid()}0/fd/3", f"/proc/{os.getpid()}/fd/{other.fileno()}"):
            monkeypatch.setenv("H2O_PREFILL_COUNTERS", inherited)
            path = shared_path()
            assert path != inherited
    one, other = Counters(path), Counters(path)
    one["sparse_tokens"] += 5
    other["sparse_tokens"] += 7
    other["checkpoint_bytes"] = 3
    other["checkpoint_bytes"] = 2
    for counters, kl in (one, 0.0001), (other, 0.002), (one, 1.5):
        counters.add_prompt(kl)
    found = read(path)
    assert found["sparse_tokens"] == 12 and found["checkpoint_bytes"] == 2
    assert found["estimated_kl"] == pytest.approx(1.5021)
    assert {name: n for name, n in found.items() if n == 1} == {"0.0001": 1, "0.003": 1, "+Inf": 1}
    assert shared_path() == path and os.readlink(path).startswith("/memfd:")
    monkeypatch.setattr(os, "getpid", lambda: 7)
    for name in ("EngineCore_DP1", "VllmWorker-0", "ApiServer_0", "MainProcess", "Process-1"):
        monkeypatch.setenv("H2O_PREFILL_COUNTERS", path)
        monkeypatch.setattr(multiprocessing.current_process(), "_name", name)
        assert (shared_path() == path) == (name not in {"MainProcess", "Process-1"})


def test_each_prompt_is_estimated_once_when_it_is_prefilled():
    planner, text = make_planner("recommended"), tokens_of(3 * CHUNK)
    run(planner, make_prompt(planner, text, "a client that leaves"), [2 * CHUNK])
    planner.forget("a client that leaves")
    assert planner.counters["estimated_kl"] == 0
    prompt = make_prompt(planner, text)
    run(planner, prompt, [3 * CHUNK])
    step(planner, (prompt, 3 * CHUNK, 3 * CHUNK + 1))
    once = planner.counters["estimated_kl"]
    # Preempted after two tokens.
    step(planner, (prompt, CHUNK, 3 * CHUNK + 2), tokens=[*text, 1, 2])
    planner.forget(prompt.request)
    assert planner.counters["estimated_kl"] == once > 0


def test_states_of_other_weights_are_replaced_and_dropped(monkeypatch):
    planner, text = make_planner(), tokens_of(3 * CHUNK)
    run(planner, make_prompt(planner, text), [CHUNK])
    planner.plan([])
    size = planner.checkpoints.nbytes
    monkeypatch.setattr(f"{__name__}.OF_TOKEN", [[-x for x in layer] for layer in OF_TOKEN])
    expected = run(planner, make_prompt(planner, text, "b"), [CHUNK, 3 * CHUNK])
    again = run(planner, make_prompt(planner, text, "c"), [3 * CHUNK], past=CHUNK)
    assert again.equal(expected[:, CHUNK:])
    planner.plan([])
    assert planner.checkpoints.nbytes == 3 * size
    planner.reset()
    assert len(planner) == len(planner.checkpoints) == planner.checkpoints.nbytes == 0
    run(planner, make_prompt(planner, text, "d"), [3 * CHUNK], past=CHUNK)
    assert planner.counters["state_misses"] == 1


def test_prompts_for_which_dense_attention_is_faster():
    cost, open_settings = 1.5, f"h2o,{SIZES}"
    shortest = PrefillConfig.parse(open_settings).shortest_at(cost)
    for settings, length, short in (
        (open_settings, shortest - 1, True),
        (open_settings, shortest, False),
        (f"{open_settings},min_prefill=none", shortest - 1, False),
        ("exact", 1, False),
        ("dense", 1, False),
    ):
        assert is_too_short(choice_of(settings), length, cost) is short
