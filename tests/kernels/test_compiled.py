"""The operators in torch.compile. Inductor launches their kernels for static sizes, or else calls the operators."""

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from lrpe_md.scripts.common import cases
from lrpe_md.scripts.common.cases import Case, LinearCase
from parametrizing import TORCH_VERSION
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel

from lrpe_md import Grid, cosine, linear_attention, rotate
from lrpe_md.engine.core.memory import split_projection
from lrpe_md.engine.encode.views import split_qkv

kernels = pytest.importorskip("lrpe_md.engine.kernels")
SCRIPT = Path(__file__).parent / "inductor.py"
MAPS = {"cosine": cosine, "rotate": rotate}
# Cases of inductor.py in which Inductor calls the operator.
BY_OPERATOR = {"any size": "forward", "any size backward": "backward", "five axes": "forward"}
BY_OPERATOR |= {"linear, causal": "linear_forward", "norm by head and group": "forward"}
BY_OPERATOR |= {"norm of rows that are not at 16 bytes": "forward", "sums of rows that are not at 16 bytes": "backward"}
MAP, SUMS, SOFTMAX = "fixed_lrpe_kernel", "fixed_reduce_partial_kernel", "fixed_softmax_sequence_kernel"
HEADS, LINEAR = "fixed_heads_kernel", "fixed_linear_{}_kernel".format
# Kernels of the other cases. By default, these are the map's kernel and, for gradients of frequencies or weights, the
# kernel that sums.
LAUNCHES = {
    "softmax over the sequence": [SOFTMAX, SOFTMAX, MAP],
    "softmax over the sequence backward": [MAP, SOFTMAX, SOFTMAX],
    "norm of heads": [HEADS],
    "norm of heads backward weights": [HEADS, SUMS],
    "tables, norm of heads": [HEADS],
    "tables computed before": [MAP, SUMS],
    "linear, one pass": [LINEAR("forward")],
    "linear, one pass, backward omega": [LINEAR("backward"), SUMS],
    "linear, half of the channels, backward omega": [LINEAR("backward"), SUMS],
    "joined linear": [LINEAR("backward")],
    "linear norm backward weights": [
        *map(LINEAR, ("state", "scan", "output", "query_gradient", "query_state", "scan", "key_gradient")), SUMS
    ],
}  # fmt: skip
NO_LIMIT, LOSES_LISTS = TORCH_VERSION < (2, 15), TORCH_VERSION < (2, 14)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def inspect_code(folder, *cases):
    """Return what inductor.py prints of cases, by their names."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    done = subprocess.run([sys.executable, str(SCRIPT), *cases], capture_output=True, text=True, env=env, timeout=500)
    assert done.returncode == 0, done.stderr
    return {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}


def check_launches(rows):
    for name, row in rows.items():
        if name in BY_OPERATOR:
            assert not row["launches"], row
            assert set(row["operators"]) == {BY_OPERATOR[name]}, row
            continue
        sums = [SUMS] if "omega" in name or "weights" in name else []
        assert row["launches"] == LAUNCHES.get(name, [MAP, *sums]), row
        assert not row["operators"], row
        assert not row["loose"]["independent"], f"{name}: memory is allocated before the inputs are ready"
        assert set(row["registers"]) == set(row["launches"]), row
        assert not row["contracted"], f"{name}: the compiler fuses products into sums"
        assert row["by_torch"] == row["defined"], f"{name}: Inductor does not launch a kernel itself"


@pytest.mark.slow
def test_launches_without_a_gpu(tmp_path):
    rows = inspect_code(tmp_path, "rotate", "norm backward weights", "any size")
    assert len(rows) == 3
    check_launches(rows)
    assert rows["rotate"]["arguments"] == [5]
    assert rows["norm backward weights"]["arguments"] == [10, 3]


@pytest.mark.slow
def test_code_without_a_gpu(tmp_path):
    rows = inspect_code(tmp_path)
    assert len(rows) == 50
    check_launches(rows)
    by_launchers = [name for name, row in rows.items() if row["launchers"]]
    without = ["norm backward weights without limits", "joined with another by a launcher, weights"]
    assert by_launchers == without or (NO_LIMIT and set(without) <= set(by_launchers))
    # It reads only graph inputs, so its allocations can't be late.
    assert rows["rotate"]["loose"]["on_inputs"] == 2
    assert not rows["formed again"]["loose"]["on_inputs"], "memory is allocated before the gradient is ready"
    # Only tensors are arguments: q, k, their outputs and omega. Nothing is copied for later operations.
    assert rows["rotate"]["arguments"] == rows["cosine"]["arguments"] == [5]
    assert rows["one tensor, float32"]["arguments"] == [3]
    assert rows["rotate backward omega"]["arguments"] == [8, 2]
    assert rows["norm"]["arguments"] == [7]
    # Tables replace omega, and views of one tensor are read in place.
    assert rows["tables"]["arguments"] == rows["tables backward"]["arguments"] == [6]
    assert rows["cos and sin side by side"]["arguments"] == [5]
    assert rows["tables for all samples and heads"]["arguments"] == [8]
    assert rows["norm backward weights"]["arguments"] == [10, 3]
    assert rows["norm by head backward omega weights phase"]["arguments"] == [14, 8]
    # Joining the gradients of a projection only writes dv, which has 11,264 elements with all four heads.
    assert [rows[f"joined {kind}"]["joined"] for kind in ("backward", "backward omega weights")] == [[11264]] * 2
    assert (rows["joined with grouped keys"]["joined"], rows["joined linear"]["joined"]) == ([5632], [])
    assert rows["joined and taken"]["joined"] not in ([], [11264]), "a gradient that is needed elsewhere is copied"
    # The launch copies a stored dv if it is aligned to 16 bytes. The other kernel reads the joined gradient.
    given = {name: row for name, row in rows.items() if "another" in name}
    at_16 = [name for name, row in given.items() if not row["joined"] and row["others"] == 1]
    assert list(given) == [*at_16, "joined with another that is not at 16 bytes"]
    assert rows["joined with another"]["arguments"] == [6]
    assert rows["rotate"]["others"] == 2, "expected no kernels but those that double the outputs"
    assert rows["rotate backward"]["others"] == rows["rotate backward omega"]["others"] == 0


def assert_same_bits(found, expected):
    """Compare tensors, lists or dicts bit by bit. Report which differ, in how many elements, and by how much."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


KINDS = ("softmax", "linear", "taken")


def attend_split(qkv, omega, num_key_heads, kind, split=split_qkv):
    q, k, v = split(qkv.unflatten(-1, (-1, 16) if num_key_heads else (3, -1, 16)), num_key_heads)
    positions = Grid((3, 4), prefix=1)
    if kind == "linear":
        return linear_attention(q, k, v, map="rotate", omega=omega, positions=positions)
    q, k = rotate(q, k, omega=omega, positions=positions)
    q = q * 2 if kind == "taken" else q
    return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=num_key_heads is not None)


def split_by_views(qkv, num_key_heads):
    """Split a projection into views. torch stacks their gradients."""
    return split_projection(qkv, num_key_heads)


@pytest.mark.slow
@pytest.mark.parametrize("num_key_heads", [None, 2])
@pytest.mark.parametrize(
    ("kind", "device", "language"),
    [
        *product(KINDS, ["cpu"], [None]),
        pytest.param("softmax", "cpu", "C++", marks=pytest.mark.slow),
        *(pytest.param(*each, marks=pytest.mark.gpu) for each in product(KINDS, ["cuda"], ["Python", "C++"])),
    ],
)
def test_projection_gradients_are_joined(kind, num_key_heads, device, language):
    """Gradients equal those of views, in one operator (if ``language`` is None) and in Inductor's code.

    test_code_without_a_gpu also checks the code for GPUs.
    """
    if (kind, device, language) == ("linear", "cuda", "C++") and LOSES_LISTS:
        pytest.skip("torch before 2.14: code by its C++ wrapper crashes where an operator returns a list of one tensor")
    backward: list = []

    def note(graph, _):
        backward.append([node.target for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    qkv = torch.randn(2, 13, 8 * 16 if num_key_heads else 3 * 4 * 16, device=device, dtype=dtype, requires_grad=True)
    omega = torch.rand(1, 8, 2, device=device, requires_grad=True)
    backend = "inductor" if language else aot_autograd(fw_compiler=make_boxed_func_of, bw_compiler=note)
    f = torch.compile(attend_split, backend=backend, fullgraph=True, dynamic=False)
    with torch._inductor.config.patch(cpp_wrapper=language == "C++"), choose_attention(device):
        found, expected = (
            torch.autograd.grad(run().square().sum(), (qkv, omega))
            for run in (
                lambda: f(qkv, omega, num_key_heads, kind),
                lambda: attend_split(qkv, omega, num_key_heads, kind, split_by_views),
            )
        )
    tolerance = 1e-5 if device == "cpu" else 2e-2  # SDPA's backward adds in random order on a GPU
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())
    if not language:
        (targets,) = backward
        assert targets.count(torch.ops.lrpe_md.join.default) == 1


def choose_attention(device):
    """Select an SDPA backend other than cuDNN's.

    In torch 2.11, cuDNN gives wrong results for a second gradient layout in one process, because the key of its cached
    plan lacks these strides (pytorch/pytorch#191576).
    """
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(others) if device == "cuda" else nullcontext()


def make_boxed_func_of(graph, _):
    return make_boxed_func(graph.forward)


def test_the_operator_that_joins_gradients():
    grads = [torch.randn(2, heads, 5, 3).transpose(1, 2).contiguous().transpose(1, 2) for heads in (4, 2, 2)]
    torch.library.opcheck(torch.ops.lrpe_md.join.default, (grads, 2))
    torch.library.opcheck(torch.ops.lrpe_md.join.default, (grads[1:] + grads[1:2], None))


def test_kernel_helpers_have_unique_names():
    """Inductor writes all helpers of a kernel into one file, by name."""
    sources = {}
    for path in Path(kernels.__path__[0]).glob("*.py"):
        for name in re.findall(r"@(?:triton\.jit|kernel)\s+def (\w+)", path.read_text()):
            sources.setdefault(name, []).append(path.stem)
    twice = {name: files for name, files in sources.items() if len(files) > 1}
    assert len(sources) > 150
    assert not twice


class Model(nn.Module):
    def __init__(self, map, impl):
        super().__init__()
        self.map, self.impl = map, impl
        self.register_buffer("omega", torch.rand(1, 8 if map == "rotate" else 16, 2))

    def forward(self, qkv):
        q, k, _ = (t.transpose(1, 2) for t in qkv.unbind(2))
        return MAPS[self.map](q, k, omega=self.omega, positions=Grid((3, 4), prefix=1), impl=self.impl)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def check_outputs(found, expected, device):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)  # on a CPU the operator runs the reference
        assert device == "cpu" or torch.equal(a, b)


def export_model(model, x):
    """Export a program that calls the operator."""
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        found = [node.target for node in program.graph.nodes if "lrpe_md" in str(node.target)]
        assert found == [torch.ops.lrpe_md.forward.default]
        return program


@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("device", DEVICES)
def test_exported_programs(map, device):
    """Exported programs call the operator."""
    model, x = Model(map, "triton").to(device), torch.randn(2, 13, 3, 4, 16, device=device)
    with torch.no_grad():
        check_outputs(export_model(model, x).module()(x), model(x), device)


@pytest.mark.slow
@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("device", DEVICES)
def test_programs_in_cpp(map, device):
    """Inductor's C++ wrapper calls the operator."""
    model, x = Model(map, "triton").to(device), torch.randn(2, 13, 3, 4, 16, device=device)
    with torch.no_grad(), torch._inductor.config.patch(cpp_wrapper=True):
        check_outputs(torch.compile(model, fullgraph=True)(x), model(x), device)


PLAIN_PACKAGE = """
import sys, torch
model, x = torch.nn.Linear(4, 4).to(sys.argv[1]), torch.randn(2, 4, device=sys.argv[1])
with torch.no_grad():
    package = torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path=sys.argv[2])
    torch._inductor.aoti_load_package(package)(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("device", DEVICES)
def test_aot_inductor_programs(map, device, tmp_path):
    """Python can load AOTInductor's program of the operator if torch can load that of a linear layer."""
    if device == "cuda":
        command = [sys.executable, "-c", PLAIN_PACKAGE, device, str(tmp_path / "plain.pt2")]
        # another test may compile the same program at the same time
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode < 0:
            pytest.skip(f"torch.nn.Linear's own package ends the process that loads it: signal {-done.returncode}")
        assert done.returncode == 0, done.stderr
    model, x = Model(map, "triton").to(device), torch.randn(2, 13, 3, 4, 16, device=device)
    path = str(tmp_path / "model.pt2")
    with torch.no_grad():
        package = torch._inductor.aoti_compile_and_package(export_model(model, x), package_path=path)
        check_outputs(torch._inductor.aoti_load_package(package)(x), model(x), device)


# --- on a GPU ----------------------------------------------------------------------------------------------------


def make_inputs(map, layout, dtype=torch.bfloat16, learn=True, size=(14, 14)):
    torch.manual_seed(0)
    n = size[0] * size[1] + 1
    channels = 64 if map == "cosine" else 32
    omega = torch.rand(1, channels, 2, device="cuda", requires_grad=learn)
    qkv = torch.randn(4, n, 3, 6, 64, device="cuda", dtype=dtype, requires_grad=True)
    if layout == "odd":
        qkv = torch.randn(4, n, 3, 6, 65, device="cuda", dtype=dtype)[..., 1:].requires_grad_()
    return qkv, omega


def encode_by(map, act="none", size=(14, 14), **options):
    def f(qkv, omega):
        q, k, _ = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return MAPS[map](q, k, omega=omega, positions=Grid(size, prefix=1), act=act, **options)

    return f


def backward_of(f, args, grads):
    y = f(*args)
    return *y, *torch.autograd.grad(y, [a for a in args if a.requires_grad], grads)


@pytest.mark.gpu
@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("layout", ["packed", "odd"])
@pytest.mark.parametrize("act", ["none", "silu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("map", MAPS)
def test_compiled_bits_equal_eager(map, dtype, act, layout, learn):
    from torch._inductor.utils import run_and_get_code

    args = make_inputs(map, layout, dtype, learn)
    f = encode_by(map, act)
    grads = [torch.randn_like(y) for y in f(*args)]
    expected = backward_of(f, args, grads)
    compiled = torch.compile(f, fullgraph=True)
    found, codes = run_and_get_code(backward_of, compiled, args, grads)
    assert_same_bits(found, expected)
    assert "fixed_lrpe_kernel" in codes[0]
    left = [layout == "odd" and learn and i == 1 for i in range(len(codes))]  # rows that the operator sums
    assert ["torch.ops.lrpe_md" in code for code in codes] == left


CASES = [
    Case("rotate", (14, 14), norm="rms", head_dim=128, heads=(8, 2), layout="packed"),
    Case("rotate", (14, 14), norm="rms", norm_groups=3, suffix=9, heads=(4, 4), head_dim=64, zero_rows=True),
    Case("cosine", (14, 14), norm="layer", norm_weight="by_head", phase=True, act="silu", head_dim=64),
    Case("rotate", (14, 14), norm="rms", norm_weight="by_head", norm_groups=2, head_dim=64),
    Case("rotate", (14, 14), norm="layer", norm_weight="none", head_dim=64, layout="odd"),
    Case("rotate", (14, 14), norm="rms", norm_over="heads", heads=(12, 12), head_dim=128),
    Case("rotate", (14, 14), norm="layer", norm_over="heads", omega_heads=2, head_dim=64),
    Case("cosine", (14, 14), act="softmax", dim=-2, head_dim=64),
]
LINEAR_CASES = [
    LinearCase("cosine", (14, 14), head_dim=64),
    LinearCase("rotate", (14, 14), head_dim=64, act="silu", normalizer="none", phase="both"),
    LinearCase("cosine", (60, 60), head_dim=64, gate="float", gate_heads=2, heads=(2, 2), layout="packed"),
    LinearCase("rotate", (60, 60), head_dim=128, normalizer="encoded", act="softplus"),
    LinearCase("rotate", (60, 60), head_dim=64, norm="rms"),
    LinearCase("cosine", (60, 60), head_dim=64, act="softplus", mask="causal"),
    LinearCase(None, (14, 14), head_dim=64, norm="layer", norm_weight="by_head"),
    LinearCase("cosine", (14, 14), head_dim=64, normalizer="encoded"),
]


@pytest.mark.gpu
@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [*CASES, *LINEAR_CASES], ids=str)
def test_compiled_bits_equal_eager_in_every_case(case, dtype, learn, monkeypatch):
    """Cover norms, softmax over the sequence, and linear attention."""
    from torch._inductor.utils import run_and_get_code

    linear = isinstance(case, LinearCase)
    name, make = ("bind_linear", cases.make_linear_inputs) if linear else ("bind", cases.make_inputs)
    call, bind = cases.run_linear if linear else cases.run, getattr(cases, name)
    inputs = make(replace(case, dtype=dtype), "cuda")
    expected = call(inputs, "triton", frequencies=learn)
    monkeypatch.setattr(cases, name, lambda *args: torch.compile(bind(*args), fullgraph=True))
    found, codes = run_and_get_code(call, inputs, "triton", frequencies=learn)
    assert_same_bits(found, expected)
    left = (linear and case.mask == "causal") or (case.norm_weight == "by_head" and case.norm_groups > 1)
    left = left or (case.norm != "none" and case.layout == "odd")
    for code in codes:
        assert ("torch.ops.lrpe_md" in code) == left


def attend(qkv, omega, encoding, size):
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    positions = Grid(size, prefix=1)
    if encoding == "linear":
        return linear_attention(q, k, v, map="rotate", omega=omega, positions=positions)
    q, k = rotate(q, k, omega=omega, positions=positions)
    return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "dtype", "size"),
    [
        ("cpu", torch.float32, (3, 4)),
        *(pytest.param("cuda", *how, marks=pytest.mark.gpu)
          for how in product([torch.float32, torch.bfloat16], [(3, 4), (14, 14)])),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("encoding", ["rotate", "linear"])
def test_encoding_and_attention_in_one_program(encoding, size, dtype, device):
    """The operators and torch's attention in one program give the same results as in eager mode."""
    torch.manual_seed(0)
    heads, head_dim = 4, 16
    tokens = size[0] * size[1] + 1
    qkv = torch.randn(2, tokens, 3, heads, head_dim, device=device, dtype=dtype, requires_grad=True)
    omega = torch.rand(1, head_dim // 2, 2, device=device, requires_grad=True)
    found = []
    with choose_attention(device):
        for f in (torch.compile(attend, fullgraph=True), attend):
            o = f(qkv, omega, encoding, size)
            found.append([o, *torch.autograd.grad(o.square().sum(), (qkv, omega))])
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2  # the backward of attention adds in random order
    for name, a, b in zip(("o", "dqkv", "domega"), *found, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max(), name


@pytest.mark.gpu
@pytest.mark.parametrize("map", MAPS)
def test_nothing_is_copied(map):
    """The GPU only runs lrpe-md's kernels and one that stacks the gradients."""
    from torch.profiler import ProfilerActivity, profile

    args = make_inputs(map, "packed", learn=False)
    f = torch.compile(encode_by(map), fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            f(*args)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            f(*args)
            torch.cuda.synchronize()
    names = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert [name for name in names if "lrpe" in name] == names
    assert len(names) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("map", MAPS)
def test_static_launcher_accepts_the_kernels(map):
    """The kernels run with Inductor's static launcher, which raises here instead of falling back."""
    args = make_inputs(map, "packed", learn=False)
    f = encode_by(map)
    grads = [torch.randn_like(y) for y in f(*args)]
    settings = {"strict_static_cuda_launcher": True, "compile_threads": 1, "fx_graph_cache": False}
    with torch._inductor.config.patch(settings):
        found = backward_of(torch.compile(f, fullgraph=True), args, grads)
    assert_same_bits(found, backward_of(f, args, grads))


@pytest.mark.gpu
def test_unaligned_input_after_an_aligned_one():
    """A program compiled for aligned inputs must not assume this alignment for others."""
    x = torch.randn(2 * 197 * 3 * 6 * 64 + 1, device="cuda", dtype=torch.bfloat16)
    omega = torch.rand(1, 32, 2, device="cuda")
    f = encode_by("rotate")
    compiled = torch.compile(f, fullgraph=True)
    for first in (0, 1):
        qkv = x[first : first + x.numel() - 1].view(2, 197, 3, 6, 64)
        assert_same_bits(compiled(qkv, omega), f(qkv, omega))


@pytest.mark.gpu
@pytest.mark.parametrize("map", MAPS)
def test_one_program_for_all_sizes(map):
    counter = CompileCounterWithBackend("inductor")

    def f(qkv, omega, size):
        q, k, _ = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return MAPS[map](q, k, omega=omega, positions=Grid(size, prefix=1))

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=counter)
    for size in [(14, 14), (16, 16), (12, 20), (24, 24), (32, 18), (10, 40), (27, 27), (37, 21)]:
        args = make_inputs(map, "packed", learn=False, size=size)
        assert_same_bits(compiled(*args, size), f(*args, size))
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_as_a_cuda_graph():
    args = make_inputs("rotate", "packed")
    f = encode_by("rotate")
    grads = [torch.randn_like(y) for y in f(*args)]
    expected = backward_of(f, args, grads)
    compiled = torch.compile(f, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        found = [t.clone() for t in backward_of(compiled, args, grads)]
    assert_same_bits(found, expected)


@pytest.mark.gpu
def test_host_time_is_close_to_a_triton_op():
    """Compare ratios from one run. The bound leaves room for other load on the host."""
    from lrpe_md.scripts.bench import compiled as bench

    found = []
    for _ in range(3):
        rows = bench.measure("rotate", "forward", torch.device("cuda", 0), 20, 50)
        times = {row["impl"]: row["p50"] for row in rows}
        found.append(times[bench.OURS] / times[bench.TRITON_OP])
    assert min(found) <= 1.3
