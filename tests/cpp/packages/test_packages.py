"""Packages of a tiny model: exported by the command line, and run by Python and by C++ programs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import tiny_models
import torch
from typer.testing import CliRunner

from h2o_prefill import ChunkedPrefillCache, PrefillConfig, enable
from h2o_prefill.cli.app import app
from h2o_prefill.generation import load_model
from h2o_prefill.generation.packages import load_package
from h2o_prefill.package import PrefillPackage

SETTINGS = (
    "h2o,chunk_size=16,local_window=3,heavy_budget=3,recall=1,"
    "error_rows=1,error_threshold=0.05,max_widen=2"
)
CAPACITY, PROMPT, NEW = 256, 150, 12


def command(*arguments):
    return CliRunner().invoke(app, [str(x) for x in arguments])


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tiny_models.save_model(tmp_path_factory.mktemp("model"))
    load_model(str(path), "bfloat16")[0].save_pretrained(path)  # as most checkpoints
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture(scope="session")
def package(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("package") / "tiny"
    types = ("--dtype", "float32", "--kv", "float32")
    sizes = ("--capacity", CAPACITY, "--preset", SETTINGS)
    result = command("export", "--model", folder, *types, *sizes, "--output", path)
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="session")
def model(folder):
    return load_model(str(folder))[0]


@pytest.fixture
def ids():
    return torch.randint(1, 257, (30,), generator=torch.Generator().manual_seed(1)).repeat(5)[None]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(tiny_models.SENTENCE * 3)
    return path


def greedy(model, ids, settings):
    with torch.no_grad(), enable(model, settings):
        return model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist()


def test_what_a_package_consists_of(package):
    info = PrefillPackage(package).info
    assert info.model == "LlamaForCausalLM" and info.capacity == CAPACITY
    assert info.config == PrefillConfig.parse(SETTINGS) and info.weights == "bfloat16"
    code = f"code-{info.code}"
    files = {"tokenizer", "weights.pt", f"{code}.json", f"{code}.so"}
    assert {path.name for path in package.iterdir()} == files
    # Each weight once, aligned, and nothing else.
    assert 0 < (package / "weights.pt").stat().st_size - info.weights_bytes < 20_000
    assert info.bytes_per_token == 2 * 2 * (2 * 16 + 1) * 4 + 8


def test_python_runs_a_package(package, model, ids):
    runner, tokenizer = load_package(package)
    assert tokenizer.decode(tokenizer("vow")["input_ids"]) == "vow"
    tokens = []
    for _ in range(2):  # the second text is not touched by what the first left in the buffers
        runner.generate(ids, NEW, tokens.append)
        assert runner.length == PROMPT + NEW - 1
        runner.reset()
    runner.generate(ids, NEW, tokens.append, draft_tokens=5)
    assert runner.length == PROMPT + NEW - 1
    runner.reset()
    assert tokens == greedy(model, ids, SETTINGS) * 3
    for prompt in (ids[0].tolist(), [ids[0].tolist()], ids[0].int()):
        assert runner.generate(prompt, NEW) == tokens[:NEW]
        runner.reset()
    for wrong in ([0.5], [[1, 2], [3]], "text", ids.float()):
        with pytest.raises(ValueError, match=r"token.ids must be"):
            runner.generate(wrong, NEW)
    with pytest.raises(ValueError, match="rows must be"):
        runner.forward(ids, torch.tensor([len(ids[0])]))
    rows = torch.tensor([0, 70, 149])
    with torch.no_grad(), enable(model, SETTINGS) as handle:
        expected = model(ids).logits[0, rows]
        estimated = handle.report().estimated_kl
    torch.testing.assert_close(runner.forward(ids, rows), expected, atol=1e-4, rtol=1e-4)
    assert (runner.estimated_kl,) == pytest.approx(estimated, rel=1e-3)


def test_the_command_line_continues_a_text(package, folder, text):
    arguments = ("generate", "--prompt-file", text, "--raw", "--max-new-tokens", NEW)
    ours = command(*arguments, "--package", package)
    theirs = command(*arguments, "--model", folder, "--preset", SETTINGS)
    assert ours.exit_code == theirs.exit_code == 0, ours.output
    assert ours.stdout == theirs.stdout
    assert "(sparse, estimated KL to dense 0." in ours.stderr.replace("\n", " ")
    settings = command(*arguments, "--package", package, "--preset", "h2o")
    assert settings.exit_code == 2 and "leave out --preset" in settings.stderr


@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_cpp_answers_questions_about_a_text(program, package, model, text, mode):
    """examples/generate.cpp beside transformers; the second question is a decoding call."""
    arguments = (package, text, *["--dense"] * (mode == "dense"))
    result = program("generate", *arguments, input="Who?\nWhy?\n")
    assert result.returncode == 0, result.stderr
    counts = [result.stderr.count(x) for x in ("first token after", " tokens/s after it, peak")]
    assert counts == [2, 2]
    tokenizer = load_package(package)[1]
    cache, ids = ChunkedPrefillCache(config=model.config), torch.empty(1, 0, dtype=torch.int64)
    said = ""
    with enable(model, SETTINGS + ",min_prefill=512" * (mode == "dense")), torch.no_grad():
        for prompt in (f"{text.read_text()}\n\nWho?\n", "\nWhy?\n"):
            ids = torch.cat([ids, tokenizer(prompt, return_tensors="pt")["input_ids"]], dim=1)
            whole = model.generate(ids, past_key_values=cache, max_new_tokens=48, do_sample=False)
            said += tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True) + "\n"
            ids = whole[:, :-1]  # the last token of an answer that was cut is not in the text
    assert result.stdout == said.replace("\r", "\n")  # as the text of a pipe is read


def test_cpp_sessions(package, tmp_path):
    """test_package_session.cpp."""
    environment = {"H2O_TEST_PACKAGE": str(package), "H2O_TEST_SESSION": str(tmp_path / "x")}
    done = subprocess.run(
        [os.environ["H2O_SESSION_TESTS"]],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_packages_and_caches_go_on_from_each_other(package, folder, ids, tmp_path):
    model, (first, rest) = load_model(str(folder))[0], (ids[:, :90], ids[:, 90:])
    runner, loaded, path = PrefillPackage(package), PrefillPackage(package), tmp_path / "session"
    with pytest.raises(ValueError, match="length must be >= 1"):
        runner.save(path)
    for piece in first.split((64, 1, 1, 24), dim=1):
        runner.forward(piece)
    runner.save(path)
    by_package = path.read_bytes()
    loaded.forward(ids.flip(1))
    loaded.load(path)
    assert torch.equal(loaded.token_ids, first)
    with enable(model, SETTINGS), torch.no_grad():
        cache = ChunkedPrefillCache.load(path, model)
        cache.save(path, model)
        outputs = [x.forward(rest) for x in (runner, loaded)]
        assert torch.equal(*outputs)
        logits = model(rest, past_key_values=cache).logits[0, -1:]
        torch.testing.assert_close(logits, outputs[0], atol=1e-4, rtol=1e-4)
        cache = ChunkedPrefillCache(config=model.config)
        for piece in first.split((64, 1, 1, 24), dim=1):
            model(piece, past_key_values=cache)
        cache.save(path, model)
        loaded.load(path)
        torch.testing.assert_close(loaded.forward(rest), logits, atol=1e-4, rtol=1e-4)
        state = [x.clone() for x in loaded._session.state()]
        batch = ChunkedPrefillCache(config=model.config)
        model(ids.expand(2, -1), past_key_values=batch)
        batch.save(path, model)
        path.with_name("cut").write_bytes(by_package[:-8])
        refused = {
            path: r"token_ids must be \[1, T\] with T >= 1, got shape \[2, 150\]",
            path.with_name("cut"): "cannot be read",
        }
    for file, message in refused.items():
        with pytest.raises(ValueError, match=message):
            loaded.load(file)
    assert all(map(torch.equal, state, loaded._session.state()))


BROKEN = {
    "nothing": ((), "usage: generate PACKAGE"),
    "another option": (("{package}", "{text}", "--sparse"), "usage: "),
    "no package": (("none", "{text}"), "error: there is no package none"),
    "no text": (("{package}", "none.txt"), "error: cannot read none.txt"),
    "another file": (
        ("{text}", "{text}"),
        "is no folder that this version's",
    ),
    "too long a text": (("{package}", "{long}"), f"the package has a capacity of {CAPACITY}"),
    "no tokenizer": (("{alone}", "{text}"), "there is no tokenizer for C++ in "),
}


def changed_metadata(package, path, change):
    """Copy a package whose metadata differ."""
    shutil.copytree(package, path)
    name, version, metadata, weights = torch.load(path / "weights.pt")
    change = dict(change)
    version = change.pop("version", version)
    fields = {k: v for k, v in {**metadata, **change}.items() if v is not None}
    torch.save((name, version, fields, weights), path / "weights.pt")
    return path


def test_calls_of_a_prompt_are_as_long_as_sparse_ones(package, ids, tmp_path):
    settings = f"{SETTINGS},min_prefill=70"
    longer = PrefillPackage(changed_metadata(package, tmp_path / "x", {"settings": settings}))
    done = []
    longer.generate(ids, NEW, on_progress=lambda tokens, total: done.append(tokens))
    assert done == [80, PROMPT], "whole chunks, not four"


@pytest.mark.parametrize("name", BROKEN)
def test_first_mistakes_get_one_line(program, package, text, tmp_path, name):
    arguments, message = BROKEN[name]
    (tmp_path / "long.txt").write_text(text.read_text() * 3)
    files = {"package": package, "text": text, "long": tmp_path / "long.txt"}
    if "{alone}" in arguments:
        files["alone"] = changed_metadata(package, tmp_path / "alone", {})
        shutil.rmtree(files["alone"] / "tokenizer")
    arguments = [x.format(**files) for x in arguments]
    result = program("generate", *arguments, cwd=tmp_path, input="Who?\n")
    assert result.returncode == 1
    assert message in result.stderr and result.stderr.count("\n") == 1, result.stderr


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("machine", "riscv64", "the package is for riscv64 machines"),
        ("torch", "2.1.0", "was written by PyTorch 2.1.0"),
        ("capacity", "-1", "capacity must be >= 1, got -1"),
        ("vocabulary", "0", "vocabulary must be >= 1, got 0"),
        ("layers", "9" * 30, "the metadata of the package are incomplete"),
        ("kv_heads", "two", "the metadata of the package are incomplete"),
        ("head_dim", None, "the metadata of the package are incomplete"),
        ("end_ids", "1,x", "the metadata of the package are incomplete"),
        ("version", 2, "version of the package must be 1, got 2: export the model again"),
        ("cpu_features", "AVX512 SVE", "code for SVE, which this CPU does not have"),
        ("dtype", "int8", "dtype of a package must be float32, bfloat16 or float16, got int8"),
        ("settings", "h2o,chunk_size=-5", "chunk_size must be >= 1, got -5"),
        ("settings", "h2o,size=5", '"size" is no setting'),
    ],
)
def test_damaged_metadata(package, tmp_path, name, value, message):
    path = changed_metadata(package, tmp_path / "x", {name: value})
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        PrefillPackage(path)
    assert "\n" not in str(refused.value).strip()


def broken_weights(folder):
    file = folder / "weights.pt"
    file.write_bytes(file.read_bytes()[:-100])


def broken_names(folder):
    file = folder / "weights.pt"
    file.write_bytes(file.read_bytes().replace(b"embed_tokens", b"embed-tokens"))


def broken_code(folder):
    (file,) = folder.glob("*.so")
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def other_code(folder):
    (file,) = folder.glob("*.so")
    file.rename(folder / "code-00000000.so")


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (
            broken_weights,
            ValueError,
            "is no package that `h2o-prefill export` wrote, or is damaged",
        ),
        (broken_names, ValueError, "is no package that `h2o-prefill export` wrote, or is damaged"),
        (broken_code, ValueError, r"code-\w+.so is damaged"),
        (other_code, FileNotFoundError, r"cannot read '.*code-\w+.so'"),
    ],
)
def test_damaged_files(package, tmp_path, damage, error, message):
    folder = Path(shutil.copytree(package, tmp_path / "x"))
    damage(folder)
    with pytest.raises(error, match=message) as refused:
        PrefillPackage(folder)
    assert "\n" not in str(refused.value)


def test_opening_writes_nothing_and_processes_share_the_weights(package, ids):
    """In a folder that cannot be written; private pages of the weights are no more than touched."""
    before = {path: path.stat().st_mtime_ns for path in (*package.iterdir(), package)}
    temporary = set(Path("/tmp").iterdir())
    package.chmod(0o500)
    try:
        runners = [PrefillPackage(package) for _ in range(2)]
    finally:
        package.chmod(0o700)
    assert len({tuple(x.generate(ids, NEW)) for x in runners}) == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not [x for x in set(Path("/tmp").iterdir()) - temporary if [*x.rglob("*.so")]]
    maps = Path("/proc/self/smaps").read_text().split("VmFlags")
    (*_, mapped) = [x for x in maps if str(package / "weights.pt") in x]
    assert " r--s " in mapped and re.search(r"Private_Dirty: +0 kB", mapped)
