"""Wrong input of every command: one line that names it, exit code 2, and no file."""

import pytest

# Options that several commands share are here once, with `ppl`.
WRONG = {
    "perplexity": {(): "perplexity"},
    "ppl": {
        ("--model", "./nowhere"): r"model: no such file or folder: './nowhere'",
        ("--model", "nobody/no-such-model"): r"model must be .* got 'nobody/no-such-model'",
        ("--threads", "4294967297"): "Invalid value for '--threads'",
        ("--preset", "best"): "settings 'best': preset must be one of",
        ("--preset", "h2o,chunk_size=-16"): "chunk_size must be >= 1, got -16",
        ("--no-such-option",): "--no-such-option",
        ("--device", "tpu"): "device must be cpu or cuda, or one GPU as cuda:1, got 'tpu'",
    },
    "compare": {
        ("--prompt-file", "missing.txt"): "--prompt-file takes no --text-file or --context",
    },
    "bench": {
        ("--lengths", "16,0"): "lengths must be numbers >= 1 .* got '16,0'",
    },
    "ablate": {
        ("--chunk-size", "16,"): 'chunk_size must be an int, got ""',
        ("--context", "64,"): "context must be numbers with commas between, got '64,'",
    },
    "retrieve": {
        ("--preset", "h2o,recal=4"): 'settings .h2o,recal=4.: "recal" is no setting',
        ("--lengths", "480,many"): "lengths must be numbers with commas between",
    },
    "export": {
        ("--output", "package", "--dtype", "int5"): "dtype must be one of .* got 'int5'",
    },
    "generate": {
        (): "give a prompt or --prompt-file, one of the two",
        ("words", "--prompt-file", "p.txt"): "give a prompt or --prompt-file, one of the two",
        ("  ",): "prompt must not be empty",
        ("--prompt-file", "missing.txt"): "--prompt-file: no such file",
        ("words", "--max-new-tokens", 600): "prompt and new tokens must be <= 512",
        ("words", "--top-k", 3, "--seed", 2**63): "--seed",
        ("words", "--draft-tokens", 5): "--draft-tokens needs --package",
    },
}


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [(command, *case) for command, cases in WRONG.items() for case in cases.items()],
)
def test_wrong_input_is_one_line(
    run, refused, small_commands, tmp_path, monkeypatch, command, arguments, message
):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    refused(run(*small_commands.get(command, (command,)), *arguments), message)
    assert set(tmp_path.iterdir()) == before
