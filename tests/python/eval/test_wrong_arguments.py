"""Arguments of every evaluation: wrong ones are refused with their names, before anything is
written; without settings, an evaluation takes what `enable` would.
"""

import pytest
import torch

import h2o_prefill
from h2o_prefill import eval as evaluation
from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation.text import Corpus

CONFIG = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4)
BOTH_DENSE = CONFIG.replace(dense_layers=(0, 1))
TEXT = Corpus("foxes", "A quick brown fox did jump over it. " * 50, "foxes.txt")
WINDOW = {"context": 64, "windows": "0:1"}
ONE = {"dataset": TEXT, "chunk_config": CONFIG, **WINDOW}
GRID = {"axes": {}, "base": CONFIG, "datasets": [TEXT], "contexts": [64], "windows": "0:1"}
NEEDLES = {"haystack": TEXT, "variants": {"small": CONFIG}, "tasks": ["single"], "lengths": [480]}


def _ids(*shape):
    return torch.ones(shape, dtype=torch.int64)


MASK = _ids(1, 64)
PROMPT = {"input_ids": _ids(64), "chunk_config": CONFIG}
COMPARED = {"inputs": _ids(64), "config": CONFIG}
RUNS = {"seq_lengths": [32], "chunk_config": CONFIG}
EVALUATIONS = {
    "perplexity": (evaluation.evaluate_perplexity, ONE),
    "ablation": (evaluation.run_ablation, GRID),
    "retrieval": (evaluation.evaluate_retrieval, NEEDLES),
    "attention": (evaluation.measure_attention, PROMPT),
    "patterns": (evaluation.visualize_attention_patterns, PROMPT),
    "compare": (h2o_prefill.compare, COMPARED),
    "throughput": (evaluation.benchmark_throughput, {**RUNS, "num_runs": 1}),
}
WRONG = {
    "perplexity": [
        ({"context": 31}, "context must be at least two chunks of 16 tokens.*got 31"),
        ({"context": 1024}, "context must be <= 512, the longest that the model takes, got 1024"),
        ({"dataset": torch.ones(300)}, "dataset must be a sequence of token ids"),
        ({"dataset": " \n"}, "dataset must not be empty text"),
        ({"tokenizer": None}, "a tokenizer must be given"),
    ],
    "ablation": [
        ({"axes": {"chunks": [1]}}, "axes must be fields of PrefillConfig.*got 'chunks'"),
        ({"axes": {"recall": []}}, "recall must be a sequence of at least one value"),
        ({"axes": {"heavy_budget": [4, -1]}}, "heavy_budget must be >= 0, got -1"),
        ({"axes": {"chunk_size": [64]}}, "that can be run: context must be at least two chunks"),
        ({"base": []}, r"base must be a sequence of at least one value, got \[\]"),
        ({"contexts": [0]}, "contexts must be >= 1 and ints, got 0"),
        ({"output": __file__}, "output must be a folder, got the file"),
    ],
    "retrieval": [
        ({"tasks": ["cwe"]}, r"tasks must be of \('single', .* got 'cwe'"),
        ({"lengths": [480, 480]}, r"lengths must hold .* each once, got \[480, 480\]"),
        ({"lengths": [31]}, "variant 'small' must be at least two chunks of 16 tokens.*got 31"),
        ({"lengths": [200]}, "lengths must be >= 3.. for task 'single', .* got 200"),
        ({"depths": [50, 101]}, "depths must be percentages from 0 to 100, got .50, 101."),
        ({"prompts_per_cell": 0}, "prompts_per_cell must be >= 1 and an int, got 0"),
        ({"haystack": TEXT.text[:60]}, "text must be longer for lengths of 480 tokens"),
        ({"variants": {"dense": CONFIG}}, "variants must not be named 'dense'"),
    ],
    "attention": [
        ({"input_ids": _ids(1)}, "input_ids must hold at least two tokens, got 1"),
        ({"input_ids": _ids(1, 513)}, "input_ids must be <= 512, .* got 513"),
        ({"chunk_config": BOTH_DENSE}, r"dense_layers must leave a layer sparse, got \(0, 1\)"),
        ({"chunk_config": CONFIG.replace(dense_layers=(7,))}, r"dense_layers must be < 2, got \(7"),
    ],
    "patterns": [
        ({"input_ids": _ids(2, 64)}, r"input_ids must be .*got torch.int64 \[2, 64\]"),
        ({"output_dir": __file__}, r"output_dir must be a folder, got the file '.*py'"),
        ({"figure_format": "gif"}, "figure_format must be one of png, svg, pdf, got 'gif'"),
    ],
    "compare": [
        ({"inputs": _ids(512)}, "prompt and new tokens must be <= 512, .* got 528"),
        ({"inputs": "a text", "tokenizer": None}, "inputs is text, so a tokenizer must be given"),
        ({"inputs": MASK * 257}, r"input_ids must be in \[0, 257\), got 257 .of another"),
        ({"inputs": [1], "config": "exact"}, "a window must hold a token to score, got a length"),
        ({"max_new_tokens": True}, "max_new_tokens must be >= 1 and an int, got True"),
    ],
    "throughput": [
        ({"seq_lengths": []}, "seq_lengths must hold at least one length, got none"),
        ({"seq_lengths": [32, 0]}, "seq_lengths must be >= 1 and an int, got 0"),
        ({"seq_lengths": [32, 513]}, "seq_lengths must be <= 512, the longest .* got 513"),
        ({"num_runs": True}, "num_runs must be >= 1 and an int, got True"),
    ],
}


@pytest.fixture
def evaluate(tiny_model, tiny_tokenizer, tmp_path):
    """Run an evaluation by its name, with changed arguments; it may write into `out`."""
    folders = {"ablation": "output", "patterns": "output_dir"}

    def run(name, model=tiny_model, **changes):
        function, given = EVALUATIONS[name]
        if not {"input_ids", "seq_lengths"} & set(given):
            given = {**given, "tokenizer": tiny_tokenizer}
        if name in folders:
            given = {**given, folders[name]: tmp_path / "out"}
        return function(model, **{**given, **changes})

    return run


@pytest.mark.parametrize(
    ("name", "changes", "message"), [(name, *case) for name in WRONG for case in WRONG[name]]
)
def test_wrong_arguments_are_refused(evaluate, tmp_path, name, changes, message):
    with pytest.raises(ValueError, match=message):
        evaluate(name, **changes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", EVALUATIONS)
def test_models_that_are_sparse_or_cannot_be_are_refused(evaluate, tiny_model, tmp_path, name):
    already = pytest.raises(ValueError, match=r"model must have .*under h2o_prefill.enable\(\)")
    if name != "compare":  # which switches it off and on again
        with h2o_prefill.enable(tiny_model, CONFIG), already:
            evaluate(name)
    assert not (tmp_path / "out").exists()
    for layer in tiny_model.model.layers:
        layer.self_attn.is_causal = False
    message = "no layer of LlamaForCausalLM can be sparse"
    warns = name in ("perplexity", "ablation", "compare")
    refused = pytest.raises(NotImplementedError, match=message)
    with pytest.warns(UserWarning, match=message) if warns else refused:
        evaluate(name)
    assert tiny_model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", EVALUATIONS)
def test_models_without_weights_or_logits_are_refused(evaluate, tiny, name):
    with pytest.raises(ValueError, match="model must have weights, got one on the meta device"):
        evaluate(name, tiny.make_model().to("meta"))
    if name in ("perplexity", "ablation", "compare"):
        with pytest.raises(ValueError, match="a head that returns logits, got BaseModelOutput"):
            evaluate(name, tiny.make_model().model)
