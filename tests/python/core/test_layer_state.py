"""`LayerState`: what one layer knows of one prompt."""

import copy
import pickle

import pytest
import torch
from op_testing import Shape, make_qkv, saved_and_loaded

from h2o_prefill import PrefillConfig, ops

LayerState = torch.classes.h2o_prefill.LayerState
SIZES = "recommended,min_prefill=none,chunk_size=16,local_window=3,heavy_budget=4"
SETTINGS = f"{SIZES},error_rows=4,recall=0"
TOKENS = 100


def random_qkv(batch=2, dtype=torch.float32):
    return make_qkv(Shape(batch, 4, 2, TOKENS, 8, 16), dtype, layout="contiguous")


def recall_of(ids, begin, end, settings):
    recalls = ids is not None and PrefillConfig.parse(settings).recall
    return ops.lexical_recall(ids[:, :end], begin, settings) if recalls else (None,) * 3


def attend(state, qkv, begin, end, settings=SETTINGS, layer=1, ids=None):
    q, k, v = (x[:, :, begin:end] for x in qkv)
    state.append(k, v)
    lists = recall_of(ids, begin, end, settings)
    return state.attend(q, layer, settings, None, None, 0.0, *lists)


def fields(state):
    numbers = torch.tensor([state.length, state.scored, state.last_chunk_begin])
    tensors = state.key, state.value, state.scores, state.memory, state.errors
    return [numbers, *(x for x in tensors if x is not None)]


def assert_same(state, expected):
    for one, other in zip(fields(state), fields(expected), strict=True):
        assert torch.equal(one, other)


def test_calls_give_what_the_operators_give():
    qkv = random_qkv()
    state, history = LayerState(), LayerState()
    for begin, end in [(0, 40), (40, 41), (41, 100)]:
        out = attend(state, qkv, begin, end)
        q, k, v = qkv[0][:, :, begin:end], qkv[1][:, :, :end], qkv[2][:, :, :end]
        assert torch.equal(history.attend_history(q, k, v, 1, SETTINGS), out)
        if begin == 40:
            assert torch.equal(out, ops.dense_attention(q, k, v))
        assert torch.equal(state.key, k)
        assert torch.equal(state.value, v)
    assert history.key is None
    assert (state.length, state.scored, state.last_chunk_begin) == (100, 100, 41 + 48)
    for name in ("scores", "memory", "errors"):
        assert torch.equal(getattr(state, name), getattr(history, name))


def test_calls_attend_before_rows_that_follow():
    qkv = random_qkv()
    state, other = LayerState(), LayerState()
    state.append(*(x[:, :, :70] for x in qkv[1:]))
    out = state.attend(qkv[0][:, :, :64], 1, SETTINGS, total=64)
    assert torch.equal(out, attend(other, qkv, 0, 64))
    assert (state.length, state.scored) == (70, 64)


@pytest.mark.parametrize(
    "duplicate",
    [
        lambda x: x.clone(),
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: LayerState.from_tensors(saved_and_loaded(x.tensors(), weights_only=True)),
    ],
    ids=["clone", "deepcopy", "pickle", "tensors"],
)
def test_copies_go_on_alone(duplicate):
    qkv, state = random_qkv(), LayerState(True)
    assert duplicate(state).length == 0
    attend(state, qkv, 0, 64)
    other = duplicate(state)
    assert_same(other, state)
    expected = attend(state, qkv, 64, 100)
    other.truncate(48)
    alone = LayerState()
    attend(alone, qkv, 0, 48)
    assert torch.equal(attend(other, qkv, 48, 100), attend(alone, qkv, 48, 100))
    state.truncate(64)
    assert torch.equal(attend(state, qkv, 64, 100), expected)


GO_ON = {
    "float32": (torch.float32, SETTINGS),
    "float64": (torch.float64, f"{SIZES},error_rows=0"),
    "bfloat16": (torch.bfloat16, f"{SIZES},error_threshold=0.02"),
    "recall": (torch.float32, f"{SIZES},recall=8,error_threshold=0.05,gqa_reduce=max"),
}


@pytest.mark.parametrize("case", GO_ON)
def test_truncate_is_exact_at_checkpoints(case):
    dtype, settings = GO_ON[case]
    qkv = random_qkv(dtype=dtype)
    ids = torch.randint(0, 9, (2, TOKENS), generator=torch.Generator().manual_seed(0))

    def call(state, begin, end):
        return attend(state, qkv, begin, end, settings, ids=ids)

    state = LayerState(True)
    out = call(state, 0, 70)
    last = call(state, 70, 71)
    for length, expected in [(71, 71), (70, 70), (69, 64), (64, 64), (63, 48), (15, 0)]:
        assert state.checkpoint_before(length) == expected
    for length in (71, 70, 64, 48, 32, 16, 0):
        state.truncate(length)
        alone, without = LayerState(True), LayerState()
        for each in (alone, without):
            if length:
                assert torch.equal(call(each, 0, min(length, 70)), out[:, :, :length])
            if length == 71:
                assert torch.equal(call(each, 70, 71), last)
        # Other states go on from the last checkpoint alone.
        memory = state.clone()
        if length:
            kept, expected = (x.checkpoint(1, settings) for x in (state, alone))
            assert all(map(torch.equal, kept, expected))
            memory = LayerState.at_checkpoint(length, *kept)
        lists = recall_of(ids, length, TOKENS, settings)
        rest = memory.attend_history(
            qkv[0][:, :, length:], *qkv[1:], 1, settings, None, None, 0.0, *lists
        )
        for each in (state.clone(), alone, without):
            assert torch.equal(call(each, length, TOKENS), rest)


@pytest.mark.parametrize("change", ["nothing", "width", "batch", "dtype"])
def test_checkpoints_that_do_not_fit_new_scores_are_dropped(change):
    state = LayerState(True)
    attend(state, random_qkv(), 0, 70)
    state.set_scores(
        *{
            "nothing": (state.scores, state.memory, state.last_chunk_begin),
            "width": (state.scores, state.memory[..., :0], state.last_chunk_begin),
            "batch": (state.scores[:1], state.memory[:1], state.last_chunk_begin),
            "dtype": (state.scores.double(), state.memory, state.last_chunk_begin),
        }[change]
    )
    assert state.checkpoint_before(69) == (64 if change == "nothing" else 0)
    again = pickle.loads(pickle.dumps(state))
    for x in (state, again):
        x.truncate(64)
    assert_same(again, state)


def test_truncate_elsewhere_forgets_what_follows():
    qkv, state = random_qkv(), LayerState()
    attend(state, qkv, 0, 70)
    scores, memory = state.scores.clone(), state.memory.clone()
    state.truncate(66)
    assert torch.equal(state.scores, scores[..., :66])
    assert torch.equal(state.memory, memory)
    assert state.last_chunk_begin == 64
    state.truncate(40)
    assert (state.length, state.scored, state.last_chunk_begin) == (40, 40, 0)
    assert (state.memory == -1).all()


def test_keys_of_others_are_not_written_to():
    qkv = random_qkv()
    key, value = (x[:, :, :64].clone() for x in qkv[1:])
    before = key.clone()
    state = LayerState()
    state.set_keys(key, value)
    state.truncate(32)
    attend(state, qkv, 32, 100)
    assert torch.equal(key, before)


def test_wrong_calls_change_nothing():
    qkv, state = random_qkv(), LayerState(max_capacity=256)
    with pytest.raises(ValueError, match="key must be appended before"):
        state.attend(qkv[0], 1, SETTINGS)
    attend(state, qkv, 0, 64)
    before = state.clone()
    q, k, v = (x[:, :, 64:] for x in qkv)
    for call, error in [
        (lambda: state.append(k[:1], v[:1]), "key must be like the earlier ones"),
        (lambda: state.append(qkv[1].repeat(1, 1, 3, 1), qkv[2].repeat(1, 1, 3, 1)), "max_capac"),
        (lambda: state.attend(q, 1, SETTINGS, total=65), "total must be in|tokens before the call"),
        (lambda: state.attend(q[:, :3, :20], 1, SETTINGS), "tokens before the call must be >= 64"),
        (lambda: state.attend_history(q, *qkv[1:], 1, "none"), "preset"),
        (lambda: state.attend_history(q[:, :3], *qkv[1:], 1, SETTINGS), "multiple of the KV heads"),
        (lambda: state.set_scores(k[..., 0], k[..., 0].int() - 9, 0), "memory must be -1 or in"),
        (lambda: state.truncate(-1), "length must be >= 0"),
        (lambda: LayerState.from_tensors(state.tensors()[:2]), "tensors must hold key and value"),
    ]:
        with pytest.raises(ValueError, match=error):
            call()
        assert_same(state, before)
