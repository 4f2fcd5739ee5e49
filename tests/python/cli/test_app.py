"""The command line as a whole: help, version, and errors that are not the user's."""

import signal
import sys

import pytest

import h2o_prefill
import h2o_prefill_cli

COMMANDS = (
    *("compare", "ppl", "ablate", "bench", "retrieve", "visualize"),
    *("generate", "export", "info"),
)


def test_help_and_version(run):
    for done in (run(), run("--help")):
        assert done.exit_code == 0 and all(name in done.stdout for name in COMMANDS)
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


class _Broken:
    @property
    def app(self):
        raise ImportError("libtorch.so:\nundefined symbol")


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (
            {"typer": None},
            "error: the command line needs the package typer: pip install 'h2o_prefill[hf]'",
        ),
        ({"h2o_prefill.cli.app": _Broken()}, "error: libtorch.so: undefined symbol"),
    ],
)
def test_without_its_packages_it_says_so_in_one_line(monkeypatch, modules, message):
    monkeypatch.delitem(sys.modules, "h2o_prefill.cli.app", raising=False)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as said:
        h2o_prefill_cli.main()
    signal.signal(signal.SIGINT, handler)
    assert said.value.code == message


def test_without_dask_it_says_what_to_install(run, small_commands, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    done = run(*small_commands["ablate"], "--scheduler", "tcp://127.0.0.1:1")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert "needs Dask: pip install 'h2o_prefill[cluster]'" in done.stderr


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
