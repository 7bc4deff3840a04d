"""The report of versions and devices."""

import pytest
import torch
from lrpe_md.scripts import cli, info

from lrpe_md import __version__


def test_report_names_versions_and_the_implementation_that_runs(monkeypatch):
    found = dict(line.split(maxsplit=1) for line in info.describe().splitlines())
    assert found["lrpe-md"] == __version__
    assert found["torch"].startswith(torch.__version__.partition("+")[0])
    monkeypatch.setattr(info, "HAS_TRITON", False)
    assert "triton is not installed" in info.describe()
    monkeypatch.setattr(info, "PACKAGES", ("no-such-package",))
    assert "not installed" in info.describe()


@pytest.mark.parametrize("arguments", [["--version"], ["info"]])
def test_console_command_prints_it(arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["lrpe-md", *arguments])
    cli.main()
    assert __version__ in capsys.readouterr().out
