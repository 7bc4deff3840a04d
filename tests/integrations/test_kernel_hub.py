"""The library as a Kernel Hub kernel, which runs under another name next to the installed package."""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
import typer
from lrpe_md.scripts import kernel_hub
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import lrpe_md


def write_kernel(*args):
    app = typer.Typer()
    app.command()(kernel_hub.main)
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "400", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("hub") / "kernel"
    done = write_kernel("--out", out, "--repo-id", "someone/lrpe-md")
    assert done.exit_code == 0, done.output
    assert f"kernel-builder upload {out}" in done.output
    return out


def load(variant: Path):
    """Load a build from its path, under its identifier, as ``kernels`` does."""
    (name,) = re.findall(r'"id": "(\w+)"', (variant / "metadata.json").read_text())
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernels(folder):
    """Load two builds in one process, next to lrpe_md."""
    yield [load(folder / "build" / f"torch-{backend}") for backend in ("cpu", "cuda")]
    for name in [name for name in sys.modules if name.startswith("_lrpe_md_")]:
        del sys.modules[name]


class Seen(TorchDispatchMode):
    """Recorder of the namespaces of the operators that run."""

    def __init__(self):
        super().__init__()
        self.namespaces = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.namespaces.add(func.namespace)
        return func(*args, **(kwargs or {}))


def run_all(library, impl):
    """Return outputs and gradients of both maps and of linear attention, with learned frequencies."""
    torch.manual_seed(0)
    found = []
    for name, channels in (("cosine", 8), ("rotate", 4), ("linear_attention", 4)):
        omega = library.axial_omega(torch.randn(2, channels // 2), channels, 2).requires_grad_()
        xs = [torch.randn(1, 2, 13, 8, requires_grad=True) for _ in range(3 if name == "linear_attention" else 2)]
        more = {"map": "rotate", "act": "relu"} if name == "linear_attention" else {}
        grid = library.Grid((3, 4), prefix=1)
        ys = getattr(library, name)(*xs, omega=omega, positions=grid, impl=impl, **more)
        ys = ys if isinstance(ys, tuple) else (ys,)
        sum((y * y.detach().sin()).sum() for y in ys).backward()
        found += [*(y.detach() for y in ys), *(x.grad for x in xs), omega.grad]
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:lrpe_md. the interpreter of Triton")  # fixed by the tests, which it can't know
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_equal_beside_the_installed_library(kernels, impl):
    expected = run_all(lrpe_md, impl)
    for kernel in kernels:
        for ours, theirs in zip(run_all(kernel, impl), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.slow
def test_operators_of_its_own(kernels):
    for library, name in ((lrpe_md, "lrpe_md"), *((kernel, kernel.__name__) for kernel in kernels)):
        with Seen() as seen:
            run_all(library, "triton")
        assert {space for space in seen.namespaces if "lrpe" in space} == {name}


def test_one_compiled_graph(kernels):
    kernel, graphs = kernels[0], []
    module = kernel.RotateMd(8)

    def encode(x):
        return module(x, positions=kernel.Grid((3, 4)))

    def keep(graph, _):
        graphs.append(graph)
        return graph

    x = torch.randn(1, 2, 12, 8)
    module.impl = "triton"
    found = torch.compile(encode, backend=keep, fullgraph=True)(x)
    torch.testing.assert_close(found, encode(x))
    (graph,) = graphs
    called = [str(node.target) for each in graph.modules() if hasattr(each, "graph") for node in each.graph.nodes]
    assert {name.split(".")[0] for name in called if "lrpe_md" in name} == {kernel.__name__}


def test_nothing_of_the_installed_library(kernels):
    for kernel in kernels:
        # The launcher is imported by the first call.
        kernel.RotateMd(8, impl="triton")(torch.randn(1, 1, 12, 8), positions=kernel.Grid((3, 4)))
        modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == kernel.__name__}
        assert f"{kernel.__name__}.engine.encode.launch" in modules
        for module in modules.values():
            foreign = {getattr(value, "__module__", None) for value in vars(module).values()}
            assert not {name for name in foreign if str(name).split(".")[0] == "lrpe_md"}


def test_what_may_be_relied_on(kernels):
    kernel = kernels[0]
    assert {"rotate", "cosine", "linear_attention", "Grid", "preset", "lrpe_cosine_md"} <= set(kernel.__all__)
    assert all(hasattr(kernel, name) for name in kernel.__all__)
    assert not hasattr(kernel, "adapt")
    assert kernel.preset("wan", head_dim=32).positions((2, 3, 4)).num_tokens == 24


def test_the_card_is_true(kernels, folder, monkeypatch):
    card = (folder / "build" / "CARD.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace('"cuda"', '"cpu"')
    code = code.replace("from kernels import get_kernel\n", "").replace("torch.randn(2, 1, 8,", "torch.randn(2, 1, 1,")
    asked = []
    space = {"get_kernel": lambda *args, **kwargs: asked.append((args, kwargs)) or kernels[0]}
    exec(code, space)
    assert asked == [(("someone/lrpe-md",), {"version": 0, "trust_remote_code": True})]
    assert space["q"].shape == (1, 1, 197, 64)


def test_imports_that_leave_a_kernel_are_refused():
    good = "from ..positions.grid import Grid\nfrom . import call\nimport torch\nfrom .._ops import ops\n"
    kernel_hub.check_imports("engine/plan.py", good)
    for bad in (
        "from lrpe_md import Grid", "import lrpe_md.engine", "def f():\n    from lrpe_md.engine import call",
        "from ..integrations import adapt", "from .. import testing", "from ..testing import Case", "from ... import x",
    ):  # fmt: skip
        with pytest.raises(kernel_hub.KernelError, match=r"engine/plan\.py: must (use|not import)"):
            kernel_hub.check_imports("engine/plan.py", bad)
    with pytest.raises(kernel_hub.KernelError, match="_INTEGRATIONS"):
        kernel_hub.close_package("from .norm import Norm as Norm\n")


@pytest.mark.slow
def test_a_folder_of_others_stays(folder, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    refused = write_kernel("--out", tmp_path)
    assert refused.exit_code == 2
    assert "expected a new folder, or one that contains a kernel" in refused.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    wrong = write_kernel("--out", tmp_path / "new", "--repo-id", "lrpe-md")
    assert "--repo-id: expected ORGANISATION/NAME, got 'lrpe-md'" in wrong.output
    assert not (tmp_path / "new").exists()
    before = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    (folder / "stale.py").write_text("")
    assert write_kernel("--out", folder, "--repo-id", "someone/lrpe-md").exit_code == 0
    assert sorted(path.relative_to(folder) for path in folder.rglob("*.py")) == before
    assert [path.name for path in folder.parent.iterdir()] == ["kernel"]


def test_their_own_tools_take_it(tmp_path):
    """If the tools of the ``kernels`` package are installed, they accept the kernel."""
    try:
        importlib.metadata.version("kernels")  # tests/kernels has its name
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package kernels is not installed")
    import kernels as tools
    from kernels._rust import Build, Digest, DigestAlgorithm, Metadata

    out = tmp_path / "kernel"
    assert write_kernel("--out", out).exit_code == 0
    for variant in (out / "build").glob("torch-*"):
        metadata = Metadata.read_from_file(variant / "metadata.json")
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
        assert metadata.id.startswith(f"_lrpe_md_{variant.name.removeprefix('torch-')}_")
        assert metadata.name.python_name == "lrpe_md"
    assert len(Build.open(out).general.backends) == 3
    kernel = tools.get_local_kernel(out / "build", backend="cpu")
    for ours, theirs in zip(run_all(kernel, "reference"), run_all(lrpe_md, "reference"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
