"""Attention that re-encodes q and k in the backward pass, and joint gradients of projections."""

import itertools
from functools import partial

import pytest
import timm
import torch
from lrpe_md.models.dit import DiT
from lrpe_md.models.lm import CausalLm, LmConfig
from lrpe_md.models.text import TextEncoder, tokenize
from parametrizing import parametrize_each, slow_except
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lrpe_md import Grid, adapt, cosine, linear_attention, rotate
from lrpe_md.engine.encode.views import split_qkv
from lrpe_md.integrations.attention import attend_encoded, softmax_attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
pytestmark = pytest.mark.parametrize("device", DEVICES)
MAPS = {"cosine": cosine, "rotate": rotate}
B, N, H, D = 2, 37, 4, 16
UNIT = B * N * H * D * 4


def plain(encode, attend, q, k, v):
    return attend(*encode(q, k), v)


def views(qkv):
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)


def call(device, map="rotate", act="none", learn=False, impl="auto", heads=1, dtype=torch.float32, **attention):
    """Return a function that computes attention in several ways, and its arguments: a projection, and frequencies."""
    torch.manual_seed(0)
    qkv = torch.randn(B, N, 3, H, D, device=device, dtype=dtype, requires_grad=True)
    omega = torch.rand(heads, D // 2 if map == "rotate" else D, 2, device=device, requires_grad=learn)
    if attention.pop("masked", False):
        attention["attn_mask"] = torch.randn(N, N, device=device).to(dtype)

    def run(qkv, omega, attend_by=attend_encoded, split=split_qkv):
        def encode(q, k):
            return MAPS[map](q, k, omega=omega, positions=Grid((6, 6), prefix=1), act=act, impl=impl)

        return attend_by(encode, partial(softmax_attention, scale=0.25, **attention), *split(qkv * 1.0))

    return run, (qkv, omega)


def gradients(run, args, **how):
    torch.manual_seed(1)  # of dropout
    y = run(*args, **how)
    torch.rand(())  # the backward pass uses the dropout of its forward pass
    return y, *torch.autograd.grad(y.square().sum(), [a for a in args if a.requires_grad])


def kept_bytes(run, args):
    """Count the bytes of distinct storages that a result's graph keeps."""
    found, seen, todo = {}, set(), [run(*args).grad_fn]

    def note(t):
        if isinstance(t, torch.Tensor):
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()

    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                raw = getattr(node, name)
                for each in raw if isinstance(raw, (tuple, list)) else [raw]:
                    note(getattr(each, "data", None))
        for t in getattr(node, "saved_tensors", ()):
            note(t)
        todo += [following for following, _ in node.next_functions]
    return sum(found.values())


def kept_bytes_compiled(run, args):
    """Count the same bytes for a compiled function. In torch 2.11, its node only shows its tensors to hooks."""
    found = {}

    def note(t):
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = run(*args)
    assert y.grad_fn is not None
    return sum(found.values())


OPTIONS = [{}, {"is_causal": True}, {"masked": True}, {"dropout_p": 0.5}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("act", "learn"), [("none", False), ("silu", True)])
@pytest.mark.parametrize("map", MAPS)
def test_gradients_are_the_same_bits(map, act, learn, options, device):
    run, args = call(device, map, act, learn, **options)
    expected = gradients(run, args, attend_by=plain, split=views)
    for a, b in zip(gradients(run, args), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("act", ["none", "silu"])
def test_the_projection_alone_is_kept(act, device):
    run, args = call(device, act=act, learn=True, impl="triton")
    floor = kept_bytes(partial(run, attend_by=lambda encode, attend, q, k, v: attend(q, k, v), split=views), args)
    usual = kept_bytes(partial(run, attend_by=plain), args)
    again = kept_bytes(run, args)
    omega = args[1].untyped_storage().nbytes()
    assert usual - again == 2 * UNIT
    assert again - floor <= omega + 1024  # and the minimum is a projection, an output and its sums
    assert floor < 5 * UNIT


@pytest.mark.parametrize("map", MAPS)
def test_grouped_keys(map, device):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 9, 16, device=device, requires_grad=True) for h in (4, 2, 2))
    omega = torch.rand(2, 8 if map == "rotate" else 16, 1, device=device)

    def encode(q, k):
        return MAPS[map](q, k, omega=omega, positions=Grid((9,)))

    attend = partial(F.scaled_dot_product_attention, enable_gqa=True, is_causal=True)
    expected = torch.autograd.grad(plain(encode, attend, q, k, v).square().sum(), (q, k, v))
    found = torch.autograd.grad(attend_encoded(encode, attend, q, k, v).square().sum(), (q, k, v))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_each_backward_encodes_once(device):
    run, args = call(device)
    calls = []

    def count(encode, attend, q, k, v):
        return attend_encoded(lambda *xs: calls.append(1) or encode(*xs), attend, q, k, v)

    y = run(*args, attend_by=count)
    assert len(calls) == 1
    for times in (2, 3):
        torch.autograd.grad(y.sum(), args[0], retain_graph=True)
        assert len(calls) == times
    with torch.no_grad():
        run(*args, attend_by=count)
    assert len(calls) == 4


def test_a_changed_projection_is_noticed(device):
    q, k, v = (torch.randn(1, 2, 5, 8, device=device) for _ in range(3))
    v.requires_grad_()
    omega = torch.rand(1, 4, 1, device=device)
    y = attend_encoded(
        lambda q, k: rotate(q, k, omega=omega, positions=Grid((5,))), F.scaled_dot_product_attention, q, k, v
    )
    q.add_(1)
    with pytest.raises(RuntimeError, match="in place"):
        y.sum().backward()


def test_second_derivatives(device):
    run, args = call(device, dtype=torch.float64)
    found = []
    for how in ({}, {"attend_by": plain, "split": views}):
        with sdpa_kernel(SDPBackend.MATH):
            y = run(*args, **how)
            (first,) = torch.autograd.grad(y.square().sum(), args[0], create_graph=True)
            found += torch.autograd.grad(first.square().sum(), args[0])
    torch.testing.assert_close(*found)


def test_transforms_and_other_hooks_take_the_plain_way(device):
    run, (qkv, omega) = call(device)
    qkv = qkv.detach()

    def total(qkv, **how):
        return run(qkv, omega, **how).square().sum()

    expected = torch.func.grad(partial(total, attend_by=plain, split=views))(qkv)
    torch.testing.assert_close(torch.func.grad(total)(qkv), expected)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = total(qkv.requires_grad_())
    assert kept
    torch.testing.assert_close(torch.autograd.grad(y, qkv)[0], expected)
    y = torch.utils.checkpoint.checkpoint(total, qkv, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(y, qkv)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize(("map", "act", "learn"), list(itertools.product(MAPS, ["none", "silu"], [False, True])))
def test_the_gradient_is_written_in_place(map, act, learn, device, monkeypatch):
    """The kernels write dq and dk, a copy writes dv, and nothing is stacked."""
    run, args = call(device, map, act, learn, impl="triton", dtype=torch.float32)
    expected = gradients(run, args, split=views)
    copies = count_copies(monkeypatch)
    found = gradients(run, args)
    assert len(copies) == 1
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def count_copies(monkeypatch):
    """Return a list that records each copy, and fail if anything is stacked."""
    copies, copy = [], torch.Tensor.copy_
    monkeypatch.setattr(torch, "stack", lambda *args, **kwargs: pytest.fail("stacked"))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other, *a: copies.append(other) or copy(self, other, *a))
    return copies


@pytest.mark.parametrize("num_key_heads", [None, 2])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("map", MAPS)
def test_the_gradient_of_a_packed_projection(map, batched, num_key_heads, device, monkeypatch):
    """The kernels write dq and dk into the gradient of `qkv`. dv is copied."""
    torch.manual_seed(0)
    heads = (3, H) if num_key_heads is None else (H + 2 * num_key_heads,)
    qkv = torch.randn(*((B,) if batched else ()), N, *heads, D, device=device, requires_grad=True)
    omega = torch.rand(1, D // 2 if map == "rotate" else D, 2, device=device)
    options = {"omega": omega, "positions": Grid((6, 6), prefix=1), "impl": "triton"}

    def add(q, k, v):
        return (q.square().sum() + k.square().sum() + v.square().sum()) / 2

    q, k, v = qkv.unbind(-3) if num_key_heads is None else qkv.split([H, num_key_heads, num_key_heads], dim=-2)
    (expected,) = torch.autograd.grad(add(*MAPS[map](*((t if batched else t[None]).transpose(1, 2) for t in (q, k)),
                                                      **options), v), qkv)  # fmt: skip
    copies = count_copies(monkeypatch)
    monkeypatch.setattr(torch, "cat", lambda *args, **kwargs: pytest.fail("joined"))
    (found,) = torch.autograd.grad(add(*MAPS[map](qkv=qkv * 1.0, num_key_heads=num_key_heads, **options)), qkv)
    assert len(copies) == 1
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"act": "silu", "normalizer": "none"}], ids=str)
@pytest.mark.parametrize("shape", [(6, 6), (20, 20)], ids=["one pass", "two"])
@pytest.mark.parametrize("map", [*MAPS, None])
def test_the_gradient_of_linear_attention_is_written_in_place(map, shape, options, device, monkeypatch):
    """The kernels write dq, dk and dv."""
    torch.manual_seed(0)
    qkv = torch.randn(1, shape[0] * shape[1] + 1, 3, 2, D, device=device, requires_grad=True)
    omega = None if map is None else torch.rand(1, D // 2 if map == "rotate" else D, 2, device=device)

    def differentiate(split):
        q, k, v = split(qkv * 1.0)
        o = linear_attention(
            q, k, v, map=map, omega=omega, positions=Grid(shape, prefix=1), impl="triton", **options
        )  # fmt: skip
        return torch.autograd.grad(o.square().sum(), qkv)

    (expected,) = differentiate(views)
    copies = count_copies(monkeypatch)
    (found,) = differentiate(split_qkv)
    assert not copies
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("attention", "copies_a_block"), [("softmax", 1), ("linear", 0)])
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_the_gradient_of_a_vision_transformer(impl, attention, copies_a_block, device, monkeypatch):
    """By default, encoded tensors are kept. The kernels write the gradient in place, but the reference doesn't."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=48, depth=2, embed_dim=32, num_heads=2, num_classes=3, pos_embed="none"
    )
    model = adapt(model, "rotate", attention=attention, encoding_kwargs={"impl": impl}).to(device)
    x = torch.randn(2, 3, 48, 48, device=device)
    y = model(x).square().sum()
    if impl == "reference":
        stacked, stack = [], torch.stack
        monkeypatch.setattr(torch, "stack", lambda ts, dim=0: stacked.append(len(ts)) or stack(ts, dim))
        y.backward()
        assert stacked.count(3) == 2
    else:
        copies = count_copies(monkeypatch)
        y.backward()
        assert len(copies) == 2 * copies_a_block


@pytest.mark.parametrize("used", ["twice", "k alone", "v alone", "changed"])
def test_gradients_that_are_not_in_place(used, device):
    """Autograd may add, omit or replace gradients on the way back to the projection."""
    torch.manual_seed(0)
    qkv = torch.randn(B, N, 3, H, D, device=device, requires_grad=True)
    omega = torch.rand(1, D // 2, 2, device=device)
    found = []
    for split in (split_qkv, views):
        q, k, v = split(qkv * 1.0)
        if used == "changed":
            q = q * 2.0
        a, b = rotate(q, k, omega=omega, positions=Grid((6, 6), prefix=1), impl="triton")
        y = {
            "twice": lambda q=q, a=a, b=b, v=v: (a * b * v * q).sum(), "k alone": lambda b=b: b.square().sum(),
            "v alone": lambda v=v: v.square().sum(), "changed": lambda a=a, b=b: (a * b).sum(),
        }[used]()  # fmt: skip
        found += torch.autograd.grad(y, qkv)
    torch.testing.assert_close(*found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@parametrize_each(
    "how impl options", [("none", False), ("silu", True)], ["reference", "triton"], [{}, {"masked": True}]
)
def test_compiled(how, impl, options, device):
    """In compiled code, only the encoding runs twice, even if it is behind an operator."""
    torch.compiler.reset()
    act, learn = how
    run, args = call(device, act=act, learn=learn, impl=impl, **options)
    backend = "aot_eager_decomp_partition"
    usual = torch.compile(partial(run, attend_by=plain), backend=backend, fullgraph=True)
    again = torch.compile(run, backend=backend, fullgraph=True)
    for a, b in zip(gradients(again, args), gradients(usual, args), strict=True):
        assert torch.equal(a, b)
    saved = kept_bytes_compiled(usual, args) - kept_bytes_compiled(again, args)
    # On a GPU, SDPA's backward stores a padded mask of 8 columns. The reference stores cos and sin.
    padding = N * (-N % 8) * 4 if options and device == "cuda" else 0
    assert saved == 2 * UNIT + padding if impl == "triton" else saved >= 2 * UNIT, saved


DEPTHS = {"eager": 2, "checkpointing": 2, "compiled": 1, "qk_norm": 2}  # each block compiles slowly


@pytest.mark.sampled
@pytest.mark.parametrize("encoding", ["rotate", "cosine", "mixed"])
@pytest.mark.parametrize("how", slow_except(["eager", "checkpointing", "qk_norm"], DEPTHS))
def test_a_vision_transformer(encoding, how, device):
    torch.compiler.reset()
    kwargs = {"qk_norm": True} if how == "qk_norm" else {}
    found = []
    for keep_encoded in (True, False):
        torch.manual_seed(0)
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=48, depth=DEPTHS[how], embed_dim=32, num_heads=2, num_classes=3, **kwargs
        )
        model = adapt(model, encoding, absolute="drop", keep_encoded=keep_encoded).to(device)
        model.set_grad_checkpointing(how == "checkpointing")
        x = torch.randn(2, 3, 48, 48, device=device)
        forward = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "compiled" else model
        y = forward(x)
        y.square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def make_dit(keep_encoded, depth):
    model = DiT(
        embed_dim=32, depth=depth, num_heads=2, encoding="rotate", encoding_kwargs={"learnable": True},
        text_encoder=TextEncoder(width=32, depth=1, num_heads=2), keep_encoded=keep_encoded,
    )  # fmt: skip
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)  # an untrained model's blocks are the identity
    return model, (torch.randn(2, 3, 8, 8), torch.rand(2), tokenize(["a red square", "one"]))


def make_lm(keep_encoded, depth, encoding="rotate"):
    sizes = {"dim": 32, "depth": depth, "num_heads": 4, "num_kv_heads": 2, "hidden": 48}
    config = LmConfig(**sizes, encoding=encoding, keep_encoded=keep_encoded)
    return CausalLm(config), (torch.randint(0, 256, (2, 12)),)


make_lm_without_positions = partial(make_lm, encoding="none")  # encodes k by repeating it, and returns q itself


@pytest.mark.sampled
@pytest.mark.parametrize("how", slow_except(["eager"], ["eager", "compiled"]))
@pytest.mark.parametrize("make", [make_dit, make_lm, make_lm_without_positions])
def test_other_backbones(make, how, device):
    torch.compiler.reset()
    found, kept = [], []
    for keep_encoded in (True, False):
        torch.manual_seed(0)
        model, args = make(keep_encoded, DEPTHS[how])
        model, args = model.to(device), tuple(x.to(device) for x in args)
        forward = torch.compile(model, backend="aot_eager_decomp_partition") if how == "compiled" else model
        y = forward(*args)
        kept.append(kept_bytes(lambda *xs, y=y: y, ()))
        y.square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert kept[1] < kept[0]


@pytest.mark.parametrize("unchanged", ["q", "k", "both", "none"])
def test_encodings_that_return_an_input(unchanged, device):
    def encode(q, k):
        return q if unchanged in ("q", "both") else 2 * q, k if unchanged in ("k", "both") else 3 * k

    qkv = torch.randn(3, B, H, N, D, device=device, requires_grad=True)
    found = []
    for attend_by in (plain, attend_encoded):
        y = attend_by(encode, partial(softmax_attention, scale=0.25), *qkv.unbind(0))
        found.append(torch.autograd.grad(y.square().sum(), qkv)[0])
    assert torch.equal(*found)


def test_one_of_two_ways_to_save_memory(device):
    model = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=0)
    with pytest.raises(ValueError, match="copy_v"):
        adapt(model, "rotate", copy_v=True, keep_encoded=False)


def test_exported(device):
    """An exported program contains no checkpoint, although its parameters require gradients."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=48, depth=1, embed_dim=32, num_heads=2, num_classes=3)
    model = adapt(model, "mixed", keep_encoded=False).to(device).eval()
    x = torch.randn(2, 3, 48, 48, device=device)
    program = torch.export.export(model, (x,))
    assert not [node for node in program.graph.nodes if "checkpoint" in str(node.target)]
    torch.testing.assert_close(program.module()(x), model(x))
