"""adapt_attention: an encoding in models that have none, against the same models with edited forwards."""

import copy
from dataclasses import dataclass
from typing import Any

import plain_models as plain
import pytest
import torch

from lrpe_md.integrations import adapt_attention

pytest.importorskip("timm")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Style:
    """A model, its edited twin, where its tokens are, and inputs of a size."""

    build: Any
    edited: Any
    positions: Any
    inputs: Any
    num_axes: int = 2
    sizes: Any = ((8, 12), (10, 6))

    def pair(self, encoding="rotate", device="cpu", **kwargs):
        """Return the adapted model and the edited one, with the same weights."""
        torch.manual_seed(0)
        model, twin = self.build().to(device), self.edited().to(device)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn_like(p) * 0.3)
        twin.load_state_dict(model.state_dict())
        self.adapt(model, encoding, **kwargs)
        for name in ("encoding", "decoder_encoding"):
            if hasattr(model, name):
                twin.add_module(name, copy.deepcopy(getattr(model, name)))
        return model, twin

    def adapt(self, model, encoding, **kwargs):
        options = {"encoding_kwargs": kwargs, "num_axes": self.num_axes}
        if not isinstance(model, plain.Mae):
            return adapt_attention(model, encoding, self.positions, **options)
        adapt_attention(model, encoding, None, modules="blocks.*.attn", **options)
        return adapt_attention(
            model, encoding, self.positions, modules="decoder_blocks.*.attn", name="decoder_encoding", **options
        )


STYLES = {
    "dit": Style(plain.Dit, plain.EditedDit, plain.dit_positions, plain.dit_inputs),
    "sit": Style(lambda: plain.sit(False), lambda: plain.sit(True), plain.sit_positions, plain.dit_inputs),
    "uvit": Style(plain.Uvit, plain.EditedUvit, plain.uvit_positions, plain.dit_inputs),
    "mae": Style(
        plain.PlacedMae, plain.EditedMae, plain.mae_positions, lambda size: (torch.randn(2, 3, *size),),
    ),
    "gpt": Style(
        plain.Gpt, plain.EditedGpt, plain.gpt_positions, lambda n: tuple(torch.randint(50, (2, 2, n))), 1, (9, 14)
    ),
}  # fmt: skip
ENCODINGS = {
    "rotate": ("rotate", {"learnable": True}),
    "cosine": ("cosine", {"learnable": True, "act": "silu"}),
    "mixed": ("mixed", {}),
}


def to(inputs, device):
    return tuple(x.to(device) for x in inputs)


def tensors(output):
    return [t for t in output if t is not None] if isinstance(output, (tuple, list)) else [output]


def run(call, inputs, model=None):
    """Return outputs and the gradients of all parameters, by name."""
    model = call if model is None else model
    torch.manual_seed(3)  # of what the model draws
    outputs = tensors(call(*inputs))
    model.zero_grad()
    sum(y.square().sum() for y in outputs).backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_bits(found, expected):
    for a, b in zip(found[0], expected[0], strict=True):
        assert torch.equal(a, b)
    assert found[1].keys() == expected[1].keys()
    for name, grad in found[1].items():
        assert torch.equal(grad, expected[1][name]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("name", STYLES)
def test_equals_edited_forwards(name, encoding, device):
    style = STYLES[name]
    scheme, kwargs = ENCODINGS[encoding]
    model, twin = style.pair(scheme, device, **kwargs)
    assert any(n.startswith("encoding") for n, _ in model.named_parameters())
    for size in style.sizes:  # the second is another than it began with
        inputs = to(style.inputs(size), device)
        assert_same_bits(run(model, inputs), run(twin, inputs))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", STYLES)
def test_checkpointing(name, reentrant):
    """Also of several forwards before a backward: each part that runs again has the positions of its own."""
    style = STYLES[name]
    model, twin = style.pair("rotate", learnable=True)
    model.checkpointing = twin.checkpointing = reentrant
    inputs = [style.inputs(size) for size in style.sizes]
    if name != "gpt":  # as many tokens at other places
        inputs.append(style.inputs((12, 8)))
    expected, found = (run(lambda: [y for x in inputs for y in tensors(m(*x))], (), m) for m in (twin, model))
    assert_same_bits(found, expected)


def assert_close(found, expected):
    """Sums of the same products in another order."""
    for a, b in zip(found[0], expected[0], strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    for name, grad in found[1].items():
        assert (grad - expected[1][name]).abs().max() <= 1e-5 * expected[1][name].abs().max().clamp_min(1e-3), name


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("name", STYLES)
def test_compiled(name, reentrant):
    """One graph, whatever the size; a checkpoint inside it, too."""
    style = STYLES[name]
    model, twin = style.pair("rotate", learnable=True)
    model.checkpointing = twin.checkpointing = reentrant
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=None)
    for size in style.sizes:
        inputs = style.inputs(size)
        assert_close(run(compiled, inputs, model), run(twin, inputs))
