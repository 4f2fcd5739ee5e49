"""A call that goes on from a checkpoint gives what the whole prompt gives, to the bit."""

import pytest
import torch

from h2o_prefill import PrefillConfig, ops
from h2o_prefill.functional import LayerOptions, attend_in_buffers
from h2o_prefill.state import Checkpoint, empty_checkpoints, empty_state

BATCH, HEADS, KV_HEADS, DIM, CHUNK = 2, 6, 2, 16, 32
SETTINGS = {
    "plain": "h2o",
    "widening": "recommended,error_threshold=0.02,recall=0",
    "recall": "recommended,error_threshold=0.05,wide=0.1x2,gqa_reduce=max",
}


def make_config(name):
    sizes = f"chunk_size={CHUNK},local_window=6,heavy_budget=5,sink_tokens=2,min_prefill=2"
    return PrefillConfig.parse(f"{SETTINGS[name]},{sizes}")


class Prompt:
    """Random queries, keys, values and ids of one layer, and the buffers of their calls."""

    def __init__(self, config, length, dtype, seed=0):
        make = torch.Generator().manual_seed(seed)
        self.config = config
        shapes = [(heads, length, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        self.tokens = [torch.randn(BATCH, *x, generator=make).to(dtype) for x in shapes]
        self.ids = torch.randint(0, 9, (BATCH, length), generator=make)
        self.buffers = [torch.zeros_like(x) for x in self.tokens[1:]]
        self.state = empty_state(self.buffers[0])
        size = config.of_layer(0).memory_size
        scores = self.state.scores.new_zeros(BATCH, KV_HEADS, length)
        memory = self.state.memory.new_full((BATCH, KV_HEADS, size), -1)
        self.buffers += [scores, memory, self.state.errors]

    def attend(self, begin, end, last_chunk_begin, keep=True):
        """Return the output of a call, and its checkpoints by position, if it is to keep them."""
        query, *added = (x[:, :, begin:end] for x in self.tokens)
        recall = (None,) * 3
        if self.config.recall:
            recall = ops.lexical_recall(self.ids[:, :end], begin, self.config)
        options = LayerOptions(recall, 0, self.config.to_string(), (None, None, 0.0))
        size = self.config.of_layer(0).memory_size
        kept = empty_checkpoints((end - begin) // CHUNK, self.state, size)
        position = torch.tensor([begin, last_chunk_begin])
        given = query, added, self.buffers, position, options
        out = attend_in_buffers(*given, checkpoints=kept if keep else ())
        ends = range(begin + CHUNK, end + 1, CHUNK)
        return out, {
            e: Checkpoint(*one) for e, one in zip(ends, zip(*kept, strict=True), strict=True)
        }

    def restore(self, position, checkpoint, other):
        """Begin after a checkpoint of another prompt's call, with its keys and values."""
        for mine, theirs in zip(self.buffers[:2], other.buffers[:2], strict=True):
            mine[:, :, :position] = theirs[:, :, :position]
        state = checkpoint.state(position)
        self.buffers[2][..., :position] = state.scores
        self.buffers[3][..., : state.memory.shape[2]] = state.memory
        self.buffers[4].copy_(state.errors)
        assert state.last_chunk_begin == position == state.length


def same(one, other):
    return all(map(torch.equal, vars(one).values(), vars(other).values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("length", [5 * CHUNK, 4 * CHUNK + 7])
def test_a_prompt_goes_on_from_any_checkpoint(name, dtype, length):
    config = make_config(name)
    whole = Prompt(config, length, dtype)
    out, checkpoints = whole.attend(0, length, 0)
    plain = Prompt(config, length, dtype)
    assert plain.attend(0, length, 0, keep=False)[0].equal(out)
    assert all(map(torch.equal, plain.buffers, whole.buffers))
    assert list(checkpoints) == [CHUNK * i for i in range(1, length // CHUNK + 1)]
    assert all((x.memory >= 0).any() and x.scores.any() for x in checkpoints.values())
    for position, checkpoint in checkpoints.items():
        alone = Prompt(config, length, dtype)
        _, its = alone.attend(0, position, 0)
        assert same(its[position], checkpoint)  # a function of the tokens before it
        if position < length:
            branch = Prompt(config, length, dtype)
            branch.restore(position, checkpoint, whole)
            rest, later = branch.attend(position, length, position)
            assert torch.equal(rest, out[:, :, position:])
            assert all(same(later[p], checkpoints[p]) for p in later) and len(later) < len(
                checkpoints
            )
            for mine, theirs in zip(branch.buffers[3:], whole.buffers[3:], strict=True):
                assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kept: kept.pop(), "must be given together"),
        (lambda kept: kept.__setitem__(0, kept[0][1:]), "checkpoint_memory must be contiguous"),
        (lambda kept: kept.__setitem__(0, kept[0].long()), "checkpoint_memory must be"),
        (lambda kept: kept.__setitem__(1, kept[1].double()), "checkpoint_scores must be"),
        (lambda kept: kept.__setitem__(2, kept[2][..., :3]), "checkpoint_errors must be"),
    ],
)
def test_wrong_tensors_are_refused(change, message):
    prompt = Prompt(make_config("plain"), 3 * CHUNK, torch.float32)
    kept = empty_checkpoints(3, prompt.state, prompt.config.memory_size)
    change(kept)
    keys, values, scores, memory, errors = prompt.buffers
    held = *prompt.tokens, keys, values, scores, memory, torch.tensor([0, 0]), None, None, None, 0
    with pytest.raises((ValueError, RuntimeError), match=message):
        kept += [None] * (3 - len(kept))
        ops.prefill_attention_(*held, prompt.config, None, None, 0.0, errors, None, *kept)
    assert not any(x.any() for x in (keys, values, scores))
