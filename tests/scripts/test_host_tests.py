"""``scripts.host_tests``: other libraries' tests on adapted models."""

import csv

import pytest
from lrpe_md.scripts import host_tests
from lrpe_md.scripts.bench import report
from lrpe_md.scripts.host_tests import Row, Run
from typer.testing import CliRunner

pytest.importorskip("transformers")
MODEL = "some"
TESTS = """
import random
import pytest
from lrpe_md.integrations.rotary import exchanged_names, parts
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)

class TestSome:
    def test_makes_a_model(self):
        LlamaForCausalLM(LlamaConfig(**SIZES))

    def test_needs_the_original(self):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        assert not any(exchanged_names(part) for part in parts(model).values())

    def test_makes_none(self):
        assert random.random() == random.Random({seed}).random()

    def test_fails(self):
        raise AssertionError

    def test_is_skipped(self):
        pytest.skip("no")
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Create a checkout of a library with one test file."""
    import zlib

    monkeypatch.setitem(host_tests.TESTS, "transformers", ("test_{}.py", (MODEL,)))
    folder = tmp_path / "checkout"
    folder.mkdir()
    text = TESTS.format(seed=zlib.crc32(b"test_makes_none"))
    (folder / f"test_{MODEL}.py").write_text(text, encoding="utf-8")
    (folder / "setup.py").write_text('setup(version="1.2.3")\n', encoding="utf-8")
    return folder


def run(*arguments):
    return CliRunner().invoke(host_tests.app, [str(argument) for argument in arguments])


def test_worse_tests_are_listed(checkout, tmp_path):
    out = tmp_path / "new" / "host-tests.csv"
    result = run("--transformers", checkout, "--out", out)
    assert result.exit_code == 1, result.output
    (row,) = csv.DictReader(out.open(encoding="utf-8", newline=""))
    assert (row["tests"], row["model"]) == ("1.2.3", MODEL)
    counts = {name: row[name] for name in ("passed_stock", "passed_adapted", "of_adapted_models", "failed_both")}
    assert counts == {"passed_stock": "3", "passed_adapted": "2", "of_adapted_models": "1", "failed_both": "1"}
    assert row["worse"] == "TestSome::test_needs_the_original"
    assert "worse: test_some.py::TestSome::test_needs_the_original" in result.output
    assert "TestSome::test_needs_the_original" in report.host_tests(out)


def test_the_row_names_the_imported_version(checkout, tmp_path):
    """PYTHONPATH may name a different version than the installed one."""
    (checkout / f"test_{MODEL}.py").write_text(
        "import transformers\ntransformers.__version__ = '1.2.4'\ndef test_passes(): pass\n", encoding="utf-8"
    )
    out = tmp_path / "host-tests.csv"
    result = run("--transformers", checkout, "--out", out)
    assert result.exit_code == 0, result.output
    (row,) = csv.DictReader(out.open(encoding="utf-8", newline=""))
    assert (row["installed"], row["tests"]) == ("1.2.4", "1.2.3")


def test_a_test_that_never_ends_is_worse():
    stock = Run({"a::b": "passed", "a::c": "passed", "a::d": "skipped", "a::e": "failed"})
    assert host_tests.find_worse(stock, Run({"a::b": "passed"})) == ["a::c"]
    assert host_tests.compare(stock, Run({"a::b": "skipped"}))["worse"] == "b c"


def test_rows_of_other_models_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(host_tests, "TESTS", {"diffusers": ("{}", ("flux", "wan")), "transformers": ("{}", ("llama",))})
    out = tmp_path / "host-tests.csv"

    def row(library, model, passed):
        return Row(library, "1", "2", model, "file", passed, passed, passed, 0, "")

    host_tests.write_rows(out, [row("transformers", "llama", 5)])
    host_tests.write_rows(out, [row("diffusers", "wan", 6), row("diffusers", "flux", 7)])
    host_tests.write_rows(out, [row("diffusers", "wan", 8)])
    rows = list(csv.DictReader(out.open(encoding="utf-8", newline="")))
    assert [(each["model"], each["passed_stock"]) for each in rows] == [("flux", "7"), ("wan", "8"), ("llama", "5")]
    text = report.host_tests(out)
    assert "20 tests pass with the originals, and none of them fail" in text
    assert "We ran diffusers 1 with the tests of 2 and transformers 1 with the tests of 2." in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected --diffusers or --transformers with a checkout that contains tests for the chosen model"),
        (("--only", "nothing"), "--only: expected one of"),
    ],
)
def test_refusals(tmp_path, arguments, message):
    out = tmp_path / "host-tests.csv"
    result = run("--out", out, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert not out.exists()


def test_a_file_without_tests(checkout, tmp_path):
    (checkout / f"test_{MODEL}.py").write_text("raise ImportError('nothing here')\n", encoding="utf-8")
    result = run("--transformers", checkout, "--out", tmp_path / "host-tests.csv")
    assert result.exit_code == 2
    assert "expected at least one test to run, got none" in " ".join(result.output.replace("│", " ").split())
