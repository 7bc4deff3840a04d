"""The console command, and the same programs run as modules of a checkout."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from lrpe_md.scripts import cli
from lrpe_md.scripts.common.options import warn_of_smoke
from lrpe_md.scripts.train.app import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "typer", "accelerate", "pandas", "joblib", "torchmetrics", "sklearn", "matplotlib", "rich", "timm", "scipy",
)  # fmt: skip
PLACES = ("scripts", "lrpe_md.scripts")
USERS = {
    "typer": list(cli.PROGRAMS),
    "rich": ["train", "ablate", "bench"],
    "scipy": ["ablate"],
    "matplotlib": ["visualize"],
}


# Runs cases (module, missing package, arguments), each in a fork of one process that has imported the slow packages.
RUN = """
import importlib, importlib.abc, json, os, runpy, sys, traceback

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def run(module, arguments):
    sys.argv[1:] = arguments
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

found = []
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
for module, missing, arguments in json.loads(sys.argv[2]):
    assert missing not in {name.partition(".")[0] for name in sys.modules}, missing
    streams = [os.memfd_create(name) for name in ("out", "err")]
    child = os.fork()
    if not child:
        for number, stream in enumerate(streams, 1):
            os.dup2(stream, number)
        if missing:
            sys.meta_path.insert(0, Missing())
        code = run(module, arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = [os.pread(stream, 2**20, 0).decode() for stream in streams]
    found.append([code, *said])
print(json.dumps(found))
"""


class Output(NamedTuple):
    code: int
    out: str
    error: str


def run_modules(cases: list[tuple[str, str | None, list[str]]], imported: Sequence[str] = ("timm",)) -> list[Output]:
    """Run cases of (module, missing package, arguments) in a process that has imported these packages."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(imported), json.dumps(cases)], cwd=ROOT, capture_output=True, text=True,
        env=env, check=True,
    )  # fmt: skip
    return [Output(*each) for each in json.loads(done.stdout)]


@pytest.mark.slow
def test_programs_are_modules_of_a_checkout():
    cases = [(f"{package}.{name}", None, ["--help"]) for package in PLACES for name in cli.PROGRAMS]
    imported = ("timm", "accelerate", "torchmetrics.classification", "sklearn.datasets", "matplotlib.pyplot", "pandas")
    for (module, *_), shown in zip(cases, run_modules(cases, imported), strict=True):
        assert shown.code == 0, shown.error
        assert f"Usage: lrpe-md {module.rpartition('.')[2]}" in shown.out


@pytest.mark.slow
def test_program_starts_in_a_new_process():
    """Start a program without preloaded packages."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.visualize", "--help"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "lrpe-md visualize" in done.stdout


def test_a_training_command_without_train():
    assert tuple(COMMANDS) == cli.TRAIN
    with pytest.raises(
        SystemExit, match=r"^lrpe-md: unknown program 'sample'; did you mean 'train sample'\? Expected one of"
    ):
        cli.main(["sample", "runs/lm"])


def test_usage_and_an_unknown_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lrpe-md"])
    cli.main()
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.PROGRAMS)
    monkeypatch.setattr(sys, "argv", ["lrpe-md", "fly"])
    with pytest.raises(
        SystemExit, match=r"unknown program 'fly'\. Expected one of train, ablate, visualize, info, bench, "
    ):
        cli.main()


@pytest.mark.parametrize("start", [cli.main, lambda: cli.run_program("train")], ids=["lrpe-md", "python -m"])
def test_the_command_line_is_read_once(monkeypatch, start):
    reads, read = [], cli.import_modules
    monkeypatch.setattr(cli, "import_modules", lambda arguments: reads.append(arguments) or read(arguments))
    monkeypatch.setattr(sys, "argv", ["lrpe-md", *(["train"] if start is cli.main else []), "digits", "--help"])
    with pytest.raises(SystemExit) as ended:
        start()
    assert (ended.value.code, reads) == (0, [["train", "digits", "--help"]])


def walk(command, name):
    """Yield each command of a program with its full name."""
    yield name, command
    for key, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, f"{name} {key}")


@pytest.mark.parametrize("program", [name for name in cli.PROGRAMS if name != "train"])
def test_each_command_has_an_example_that_parses(program):
    commands = dict(walk(typer.main.get_command(cli.load_program(program)), f"lrpe-md {program}"))
    for name, command in commands.items():
        label, _, example = (command.epilog or "").partition(": ")
        assert (label, example.startswith(name)) == ("Example", True), name
        run = max((each for each in commands if example.startswith(each)), key=len)
        words = shlex.split(example.removeprefix(run).partition(" > ")[0])
        assert commands[run].make_context(run, words).params is not None


@pytest.mark.parametrize("program", [name for name in cli.PROGRAMS if name != "train"])
def test_help_stands_on_its_own(program):
    """Help texts don't mention other files or other ways to start the program."""
    for name, command in walk(typer.main.get_command(cli.load_program(program)), program):
        texts = [command.help or "", command.epilog or "", *(getattr(p, "help", "") or "" for p in command.params)]
        for text in texts:
            assert not re.search(rf"README|top of the file|python -m|{re.escape(str(ROOT))}", text), (name, text)


@pytest.mark.parametrize("program", cli.PROGRAMS)
def test_a_repeated_option_is_rejected(program):
    """Otherwise, all but the last value would be ignored."""
    app = typer.main.get_command(cli.load_program(program))
    context = typer.Context(app)
    names = app.list_commands(context) if hasattr(app, "list_commands") else [None]
    for name in names:
        command = app if name is None else app.resolve_command(context, [name])[1]
        single = [p for p in command.params if p.param_type_name == "option" and not (p.multiple or p.is_flag)]
        for option in single[:1]:
            with pytest.raises(
                typer.BadParameter, match=rf"{option.opts[0]}: expected one value, got 2; pass .* once$"
            ):
                command.make_context(name, [option.opts[0], "1", option.opts[0], "2"])


def test_options_are_grouped_in_panels():
    command = typer.main.get_command(cli.load_program("visualize"))
    panels = [param.rich_help_panel for param in command.params if param.name != "help"]
    assert list(dict.fromkeys(panels)) == ["Encoding", "Picture", "Output"]


def test_a_program_gets_its_options(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lrpe-md", "train", "digits", "--help"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "lrpe-md train digits" in shown
    assert "--weight-decay" in shown


@pytest.mark.slow
@pytest.mark.parametrize("packages", [("typer", "scipy"), PACKAGES])
def test_missing_package_gives_the_install_command(packages):
    """Importing the command itself needs no optional package."""
    wanted = [(package, name) for package in packages for name in USERS.get(package, ["train"])]
    tasks = {"pandas": "lm", "matplotlib": "diffusion"}
    cases = [
        # The help of train itself imports nothing.
        (f"lrpe_md.scripts.{name}", package, [tasks.get(package, "digits")] * (name == "train") + ["--help"])
        for package, name in wanted
    ]
    found = run_modules([case for case in cases if case[1] != "timm"], ["timm" if "timm" in packages else "torch"])
    if "timm" in packages:
        found += run_modules([case for case in cases if case[1] == "timm"], ["torch"])
    wanted.sort(key=lambda each: each[0] == "timm")
    for (package, name), said in zip(wanted, found, strict=True):
        assert said.code == 1, (package, name)
        assert said.error.strip() == (f"{name} needs {package}, which is not installed: pip install 'lrpe-md[scripts]'")


HEAVY = ("torch", "timm", "matplotlib", "numpy", "accelerate")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["train", "imag"], ["trian"]])
def test_help_imports_nothing_heavy(tmp_path, arguments):
    """The installed command starts without torch. sys.argv[0] is its name."""
    command = tmp_path / "lrpe-md"
    command.write_text(
        "import atexit, sys\n"
        f"atexit.register(lambda: print('imported', [m for m in {HEAVY} if m in sys.modules]))\n"
        "from lrpe_md.scripts.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, str(command), *arguments], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )  # fmt: skip
    assert "imported []" in done.stdout, done.stdout + done.stderr
    assert ("Train a " in done.stdout) == (arguments[-1] == "--help")
    assert "'image'" in done.stderr or arguments[-1] != "imag"
    assert "did you mean 'train'" in done.stderr or arguments[-1] != "trian"


@pytest.mark.slow
def test_names_of_the_package_are_found_when_the_command_uses_them(tmp_path):
    command = tmp_path / "lrpe-md"
    command.write_text("import lrpe_md, sys\nassert 'torch' not in sys.modules\nprint(lrpe_md.Grid((2, 3)).shape)\n"
                       "print(hasattr(lrpe_md, 'nothing'))\n")  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(command)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.split("\n")[:2] == ["(2, 3)", "False"], done.stderr


SCHEMES = """
from lrpe_md import Axial, Scheme, register_scheme

register_scheme("from_my_module", Scheme("doc", 32, Axial((1, 1), 30.0)))
"""


@pytest.mark.usefixtures("few_sizes")
@pytest.mark.parametrize("first", [True, False])
def test_own_schemes_are_registered_by_a_module(tmp_path, monkeypatch, first):
    pytest.importorskip("sklearn")
    module = f"own_schemes_{first}"
    (tmp_path / f"{module}.py").write_text(SCHEMES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("lrpe_md.presets.registry.REGISTERED", registered := {})
    monkeypatch.setattr("lrpe_md.scripts.train.encodings.REGISTERED", registered)
    command = ["train", "digits", "--encoding", "from_my_module", "--steps", "1", "--limit", "64", "--device", "cpu",
               "--out", "run"]  # fmt: skip
    importing = ["--import", module] if first else [f"--import={module}"]
    monkeypatch.setattr(sys, "argv", ["lrpe-md", *importing, *command] if first else ["lrpe-md", *command, *importing])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 0
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    assert sys.path[-1] == str(tmp_path)  # its files don't hide installed packages


def test_repeated_commands_import_the_same_modules(monkeypatch, capsys):
    app = typer.Typer()

    @app.command()
    def measure(context: typer.Context, size: int = 1, smoke: bool = False) -> None:
        warn_of_smoke(context, "sizes are tiny")

    monkeypatch.setattr(cli, "load_program", lambda name: app)
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--size", "2", "--import", "json", "--smoke", "--import=shlex"])
    assert ended.value.code == 0
    assert capsys.readouterr().err.endswith("run:\nlrpe-md bench --size 2 --import json --import shlex\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--import", "no_such_schemes"],
            r"expected an installed module or .*, got 'no_such_schemes': No module",
        ),
        (["--import=my_schemes.py", "train"], r"expected an installed module .*; pass my_schemes, without .py"),
        (
            ["train", "--import", "./my_schemes"],
            r"expected the name of a module, such as .*, got './my_schemes'",
        ),
        (["train", "--import"], r"expected the name of a module, .*got ''"),
    ],
)
def test_modules_that_cannot_be_imported(monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["lrpe-md", *arguments])
    with pytest.raises(SystemExit, match=f"--import: {message}"):
        cli.main()


def test_internal_import_errors_are_raised(monkeypatch):
    def broken(name, package):
        raise ModuleNotFoundError("No module named 'lrpe_md.nothing'", name="lrpe_md.nothing")

    monkeypatch.setattr(cli.importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError, match=r"lrpe_md\.nothing"):
        cli.load_program("train")


def test_info_takes_no_arguments(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lrpe-md", "info", "--help"])
    cli.main()
    shown = capsys.readouterr().out
    assert "Example: lrpe-md info" in shown
    assert cli.REPORT_BUGS in shown
    for page in ("README.md", "docs/troubleshooting.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert cli.REPORT_BUGS.removeprefix("To report a bug, ") in text
    monkeypatch.setattr(sys, "argv", ["lrpe-md", "info", "twice"])
    with pytest.raises(SystemExit, match="takes no arguments, got twice"):
        cli.main()


# Runs each command in a fork of one process that has imported torch, and fails unless all exit codes are 1.
FORK = """
import os
from lrpe_md.scripts.cli import main

codes = []
for option in ("info", "--help"):
    if child := os.fork():
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    else:
        main([option])
        os._exit(0)
os._exit(codes != [1, 1])
"""


@pytest.mark.slow
def test_a_closed_pipe_ends_without_a_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", FORK], stdout=writer, stderr=subprocess.PIPE, text=True, env=env)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_warnings_name_options(capsys):
    from lrpe_md.models.dit import DiT

    of_program = compile("make()", str(Path(cli.__file__).with_name("train.py")), "eval")

    def make():  # between our script and our model, like timm's builder
        return DiT(encoding="rotate", embed_dim=8, num_heads=2, depth=1, num_axes=3)

    def build():
        eval(of_program, {"__name__": "lrpe_md.scripts.train", "make": make})

    with pytest.warns(UserWarning, match="with split= in the encoding_kwargs"):
        build()
    with cli.reword_warnings():
        build()
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("Warning: head_dim: expected channels for each of the 3 axes, got 0,1,1")
    assert shown[0].endswith("or choose each axis's share with --encoding NAME:split=...")
    assert len(shown) == 1
    with pytest.warns(UserWarning, match="with split= in the encoding_kwargs"):
        build()
