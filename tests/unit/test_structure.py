"""Structural limits on the numbers of arguments, the lengths of functions, imports, and files that a call enters."""

import ast
from pathlib import Path

import pytest
import structure_limits

ROOT = Path(__file__).parents[2]
LIMITS = {
    "kernel arguments": 12,
    "arguments of another GPU function": 12,
    "functions with more than 8 positional parameters": 0,
    "functions over 80 lines of code": 0,
    "functions over 60 lines of code": 6,
    "constexprs by position": 150,
    "import cycles": 0,
    "file changes in a warm forward": 8,
    "file changes in a warm rotate": 8,
    "file changes in a warm linear_attention": 14,
}
# Names that several files of lrpe_md define with the same meaning.
SAME_MEANING = {
    # the launchers of an operator; an operator and its reference
    "_call_key", "backward", "differentiate", "differentiate_causal", "find_saved_shapes", "forward", "run_shards",
    "attend_encoded", "cosine", "encode", "rotate",
    # a kernel's helper and the same step in PyTorch
    "activate", "lay_out_decay", "split_pairs", "zero_gated_tokens",
}  # fmt: skip
PACKAGE = {
    "kernels.py": '''
@triton.jit
def _inner(x, y, D: tl.constexpr, E: tl.constexpr = 1):
    return x

@triton.jit
def _middle(x, A, B, C, E, F, G, H, I, J, K, L, M: tl.constexpr):
    return _inner(x, 1, M, E=2) + _inner(x, 1, M, 2) + tl.sum(x, M)

@kernel
def lrpe_kernel(p_x, n: "i32", *, D: tl.constexpr):
    from .helpers import _far as near
    _middle(p_x, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, D)
    near(p_x, D)
''',
    "helpers.py": '''
from . import kernels

@triton.jit
def _far(x, D: tl.constexpr):
    return kernels._inner(x, x, D)

class Long:
    def method(self, a, b, c, d, e, f, g, h, *, i=0):
        """Eight."""

    @staticmethod
    def static(a, b, c, d, e, f, g, h, i):
        """Nine."""

    def forward_intermediates(self, a, b, c, d, e, f, g, h, i):
        """timm's, in another class."""

@app.command()
def command(a, b, c, d, e, f, g, h, i):
    """May."""

def other_command(a: Annotated[int, typer.Option(help="")], b, c, d, e, f, g, h, i):
    """May."""
''',
    "lengths.py": "def short():\n    '''Two\n\n    lines.'''\n" + "    # why\n\n    x = 1\n" * 79
    + "\ndef long():\n    '''One.'''\n" + "    x = 1\n" * 80 + "\ndef lrpe_kernel():\n" + "    x = 1\n" * 200,
}  # fmt: skip


@pytest.fixture(scope="module")
def ours():
    return structure_limits.Checkout(ROOT)


@pytest.fixture(scope="module")
def measurements(ours):
    return structure_limits.measure(ours)


@pytest.mark.parametrize("name", LIMITS)
def test_limits(name, measurements):
    assert measurements[name] <= LIMITS[name], "python tests/structure_limits.py lists the offenders"


def test_names_have_one_meaning(ours):
    """A function or class is defined in one file, unless all definitions of the name have the same meaning."""
    repeated = ours.repeated_names()
    assert repeated.keys() == SAME_MEANING, {name: repeated.get(name) for name in repeated.keys() ^ SAME_MEANING}


def test_every_measurement_has_a_limit(measurements):
    assert measurements.keys() == LIMITS.keys()


@pytest.fixture
def checkout(tmp_path):
    """Create a package that breaks the rules."""
    (tmp_path / "lrpe_md").mkdir()
    for name, source in PACKAGE.items():
        (tmp_path / "lrpe_md" / name).write_text(source)
    return structure_limits.Checkout(tmp_path)


def test_arguments_are_counted(checkout):
    assert checkout.kernel_arguments() == 3
    assert checkout.largest_gpu_function() == (13, "lrpe_md/kernels.py::_middle")
    assert checkout.many_positional() == {
        "lrpe_md/helpers.py::Long.static": 9, "lrpe_md/helpers.py::Long.forward_intermediates": 9
    }  # fmt: skip


def test_constexprs_are_counted(checkout):
    of = {name.split("::")[1]: number for name, number in checkout.constexprs_by_position().items()}
    assert of == {"_middle": 3, "lrpe_kernel": 2, "_far": 1}


def test_repeated_names_are_found(checkout):
    assert checkout.repeated_names() == {"lrpe_kernel": ["lrpe_md/kernels.py", "lrpe_md/lengths.py"]}


def test_lines_are_counted(checkout):
    assert checkout.long_functions() == {"lrpe_md/lengths.py::long": 81}


def test_import_cycles_are_found(checkout):
    assert checkout.import_cycles() == [["lrpe_md.helpers", "lrpe_md.kernels"]]


@pytest.mark.parametrize(
    ("importing", "name", "expected"),
    [
        ("models/vit.py", "from ..lrpe_md import x", {}),
        ("models/vit.py", "from .. import Grid", {"Grid": "lrpe_md:Grid"}),
        ("models/vit.py", "from .text import T as U", {"U": "models.text:T"}),
        ("models/vit.py", "def f():\n    from lrpe_md.models import text", {"text": "models.text"}),
        ("models/vit.py", "import torch, lrpe_md.plan as p", {"p": "lrpe_md.plan"}),
        ("lrpe_md/plan.py", "from ..lrpe_md.models.text import T", {"T": "models.text:T"}),
        ("lrpe_md/plan.py", "from timm import models", {}),
    ],
)
def test_imports_are_found(tmp_path, importing, name, expected):
    files = ["lrpe_md/__init__.py", "lrpe_md/plan.py", "models/__init__.py", "models/vit.py", "models/text.py"]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(name if file == importing else "")
    checkout = structure_limits.Checkout(tmp_path)
    module = checkout.modules[importing.removesuffix(".py").replace("/", ".")]
    assert checkout.imports(module) == expected


def test_listed_overrides_exist(ours):
    """Each listed override exists and needs the exemption."""
    places = {place.name: place for _, _, place in ours.functions}
    for name in structure_limits.OVERRIDES:
        assert len(places[name].parameters) > structure_limits.MOST_POSITIONAL


def test_first_call_enters_more_files_than_warm_call(ours):
    """A call that validates its arguments passes through more files than a cached call."""
    files = ours.files_of_calls
    assert files["warm"][0] == files["first"][0] == "functional.py"
    assert len(files["first"]) > len(files["warm"]) >= 3
    assert files["warm, of a module"][0] != "functional.py"


FORBIDDEN_IN_ADAPTERS = {"exec", "eval", "compile", "ast", "linecache", "getsource", "getsourcelines"}


def list_names(source):
    """Return the names that the source imports and reads, and attributes of ``inspect``."""
    nodes = list(ast.walk(ast.parse(source)))
    found = {node.id for node in nodes if isinstance(node, ast.Name)}
    found |= {node.name for node in nodes if isinstance(node, ast.alias)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    return found | {node.attr for node in attributes if ast.unparse(node.value) == "inspect"}


def test_adapters_read_and_execute_no_source():
    """Libraries may be installed without source, and source can't show what a function refers to."""
    for path in (ROOT / "lrpe_md" / "integrations").rglob("*.py"):
        assert not list_names(path.read_text(encoding="utf-8")) & FORBIDDEN_IN_ADAPTERS, path.name
    assert list_names("import ast\nexec(inspect.getsource(f))") >= {"ast", "exec", "getsource"}


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="expected a checkout"):
        structure_limits.Checkout(tmp_path)


def test_file_names_are_unique():
    # pytest imports tests by file name only, and Python imports the first helper with that name.
    names = [path.name for path in (ROOT / "tests").rglob("*.py")]
    assert len(set(names)) == len(names)
