"""A call that goes on from a checkpoint gives what the whole prompt gives, to the bit."""

import pytest
import torch
from op_testing import Shape, make_qkv

from h2o_prefill import PrefillConfig, ops
from h2o_prefill.state import LayerState

CHUNK = 32
SETTINGS = {
    "plain": "h2o",
    "widening": "recommended,error_threshold=0.02,recall=0",
    "recall": "recommended,error_threshold=0.05,gqa_reduce=max",
}


def make_config(name):
    sizes = f"chunk_size={CHUNK},local_window=6,heavy_budget=5,sink_tokens=2,min_prefill=2"
    return PrefillConfig.parse(f"{SETTINGS[name]},{sizes}")


class Prompt:
    """Random queries, keys, values and ids of one layer."""

    def __init__(self, config, length, dtype):
        self.config = config
        self.qkv = make_qkv(Shape(2, 6, 2, length, 16, 16), dtype=dtype)
        self.ids = torch.randint(0, 9, (2, length), generator=torch.Generator().manual_seed(0))

    def attend(self, state, begin, end):
        recall = (None,) * 3
        if self.config.recall:
            recall = ops.lexical_recall(self.ids[:, :end], begin, self.config)
        query, *history = self.qkv[0][:, :, begin:end], *(x[:, :, :end] for x in self.qkv[1:])
        return state.attend_history(
            query, *history, 1, self.config.to_string(), None, None, 0.0, *recall
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("length", [5 * CHUNK, 4 * CHUNK + 7])
def test_a_prompt_goes_on_from_any_checkpoint(name, dtype, length):
    prompt = Prompt(make_config(name), length, dtype)
    whole, plain = LayerState(True), LayerState()
    out = prompt.attend(whole, 0, length)
    assert torch.equal(prompt.attend(plain, 0, length), out)
    for position in range(CHUNK, length, CHUNK):
        branch = whole.clone()
        assert branch.checkpoint_before(position) == position
        branch.truncate(position)
        alone = LayerState(True)
        prompt.attend(alone, 0, position)
        expected = alone.checkpoint(1, prompt.config.to_string())
        for one, other in zip(
            branch.checkpoint(1, prompt.config.to_string()), expected, strict=True
        ):
            assert torch.equal(one, other)
        assert torch.equal(prompt.attend(branch, position, length), out[:, :, position:])
        assert torch.equal(branch.memory, whole.memory)
        assert torch.equal(branch.errors, whole.errors)
