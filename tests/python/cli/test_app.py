"""The command line as a whole: help, version, and errors that are not the user's."""

import dataclasses
import signal
import sys

import pytest

import h2o_prefill
import h2o_prefill_cli
from h2o_prefill.config import PrefillConfig

COMMANDS = (
    *("compare", "ppl", "ablate", "bench", "retrieve", "visualize"),
    *("generate", "export", "info"),
)


def test_help_and_version(run):
    for arguments in ((), ("--help",)):
        done = run(*arguments)
        assert done.exit_code == 0
        assert all(name in done.stdout for name in COMMANDS)
    assert run("--version").stdout == f"h2o-prefill {h2o_prefill.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_has_help(run, command):
    typer = pytest.importorskip("typer")
    from h2o_prefill.cli.app import app

    done = run(command, "--help")
    assert done.exit_code == 0 and "--" in done.stdout
    for parameter in typer.main.get_command(app).commands[command].params:
        text = parameter.help or ""
        assert len(text.split()) >= 3 and text[0].isupper() and text[-1] == ".", parameter.name
        assert not text.startswith(("Of ", "See ")), parameter.name


def test_every_field_is_an_option_of_ablate():
    typer = pytest.importorskip("typer")
    from h2o_prefill.cli.app import app

    options = {x.opts[0]: x.help for x in typer.main.get_command(app).commands["ablate"].params}
    for field in dataclasses.fields(PrefillConfig):
        # Up to the first name of another option.
        text = field.metadata["help"].partition("`")[0].strip()
        assert options[f"--{field.name.replace('_', '-')}"].startswith(text)


def test_without_its_packages_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "h2o_prefill.cli.app", raising=False)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as said:
        h2o_prefill_cli.main()
    signal.signal(signal.SIGINT, handler)
    expected = "error: the command line needs the package typer: pip install 'h2o_prefill[hf]'"
    assert said.value.code == expected


def test_without_dask_it_says_what_to_install(run, small_commands, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    done = run(*small_commands["ablate"], "--workers", "1")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert "need Dask: pip install 'h2o_prefill[cluster]'" in done.stderr


def test_mistakes_of_ours_and_debug_show_the_traceback(run, monkeypatch):
    def broken(*_):
        raise TypeError("ours")

    monkeypatch.setattr("h2o_prefill.generation.load_text", broken)
    done = run("ppl")
    assert isinstance(done.exception, TypeError)
    assert done.exit_code == 1
    monkeypatch.setenv("H2O_PREFILL_DEBUG", "1")
    assert isinstance(run("ppl", "--windows", "x").exception, ValueError)


def test_errors_of_several_lines_are_one(run, monkeypatch):
    def broken(*_):
        raise RuntimeError("CUDA error: unknown\nCUDA kernel errors might be reported later")

    monkeypatch.setattr("h2o_prefill.generation.load_text", broken)
    assert run("ppl").stderr == "error: CUDA error: unknown\n"

    class Broken:
        @property
        def app(self):
            raise ImportError("libtorch.so:\nundefined symbol")

    monkeypatch.setitem(sys.modules, "h2o_prefill.cli.app", Broken())
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as said:
        h2o_prefill_cli.main()
    signal.signal(signal.SIGINT, handler)
    assert said.value.code == "error: libtorch.so: undefined symbol"
