"""Renamed weights of published diffusion models give equal outputs in our model (models/dit.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("timm")

from lrpe_md.models.dit import DiT, patchify, unpatchify
from lrpe_md.models.text import LabelEncoder, Text

# Our names and the original ones; several originals are concatenated. {i} counts blocks.
DIFFUSERS_BLOCK = {
    "blocks.{i}.image.qkv": ("{b}.{i}.attn1.to_q", "{b}.{i}.attn1.to_k", "{b}.{i}.attn1.to_v"),
    "blocks.{i}.image.proj": "{b}.{i}.attn1.to_out.0",
    "blocks.{i}.image.q_norm": "{b}.{i}.attn1.norm_q",
    "blocks.{i}.image.k_norm": "{b}.{i}.attn1.norm_k",
    "blocks.{i}.image.mlp.fc1": "{b}.{i}.{ff}.net.0.proj",
    "blocks.{i}.image.mlp.fc2": "{b}.{i}.{ff}.net.2",
    "blocks.{i}.image.modulation.table": "{b}.{i}.scale_shift_table",
    "blocks.{i}.cross.q": "{b}.{i}.attn2.to_q",
    "blocks.{i}.cross.kv": ("{b}.{i}.attn2.to_k", "{b}.{i}.attn2.to_v"),
    "blocks.{i}.cross.q_norm": "{b}.{i}.attn2.norm_q",
    "blocks.{i}.cross.k_norm": "{b}.{i}.attn2.norm_k",
    "blocks.{i}.cross.proj": "{b}.{i}.attn2.to_out.0",
    "modulation.table": "scale_shift_table",
}
DIT = {
    **DIFFUSERS_BLOCK,
    "embed": "pos_embed.proj",
    "time.mlp.fc1": "{b}.0.norm1.emb.timestep_embedder.linear_1",
    "time.mlp.fc2": "{b}.0.norm1.emb.timestep_embedder.linear_2",
    "text_encoder.embed": "{b}.0.norm1.emb.class_embedder.embedding_table",
    "blocks.{i}.image.modulation.1": "{b}.{i}.norm1.linear",
    "modulation.1": "proj_out_1",
    "head": "proj_out_2",
}
PIXART = {
    **DIFFUSERS_BLOCK,
    "embed": "pos_embed.proj",
    "time.mlp.fc1": "adaln_single.emb.timestep_embedder.linear_1",
    "time.mlp.fc2": "adaln_single.emb.timestep_embedder.linear_2",
    "shared_modulation.1": "adaln_single.linear",
    "text_embed.fc1": "caption_projection.linear_1",
    "text_embed.fc2": "caption_projection.linear_2",
    "head": "proj_out",
}
WAN = {
    **DIFFUSERS_BLOCK,
    "embed": "patch_embedding",
    "time.mlp.fc1": "condition_embedder.time_embedder.linear_1",
    "time.mlp.fc2": "condition_embedder.time_embedder.linear_2",
    "shared_modulation.1": "condition_embedder.time_proj",
    "text_embed.fc1": "condition_embedder.text_embedder.linear_1",
    "text_embed.fc2": "condition_embedder.text_embedder.linear_2",
    "blocks.{i}.cross.norm": "{b}.{i}.norm2",
    "head": "proj_out",
}
SIT = {
    "embed": "x_embedder.proj",
    "time.mlp.fc1": "t_embedder.mlp.0",
    "time.mlp.fc2": "t_embedder.mlp.2",
    "text_encoder.embed": "y_embedder.embedding_table",
    "blocks.{i}.image.norm1": "blocks.{i}.norm1",
    "blocks.{i}.image.norm2": "blocks.{i}.norm2",
    "blocks.{i}.image.qkv": "blocks.{i}.attn.qkv",
    "blocks.{i}.image.q_norm": "blocks.{i}.attn.q_norm",
    "blocks.{i}.image.k_norm": "blocks.{i}.attn.k_norm",
    "blocks.{i}.image.proj": "blocks.{i}.attn.proj",
    "blocks.{i}.image.mlp.fc1": ("blocks.{i}.mlp.{fc1}",),
    "blocks.{i}.image.mlp.fc2": ("blocks.{i}.mlp.{fc2}",),
    "blocks.{i}.image.modulation.1": "blocks.{i}.adaLN_modulation.1",
    "norm": "final_layer.norm_final",
    "modulation.1": "final_layer.adaLN_modulation.1",
    "head": "final_layer.linear",
}
_STREAMS = {  # of FLUX's joint blocks
    "image": ("to_q", "to_k", "to_v", "to_out.0", "norm_q", "norm_k", "ff", "norm1"),
    "text": (
        "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "norm_added_q", "norm_added_k", "ff_context",
        "norm1_context",
    ),
}  # fmt: skip
FLUX = {
    "embed": "x_embedder",
    "time.mlp.fc1": "time_text_embed.timestep_embedder.linear_1",
    "time.mlp.fc2": "time_text_embed.timestep_embedder.linear_2",
    "text_embed": "context_embedder",
    "pooled_embed.fc1": "time_text_embed.text_embedder.linear_1",
    "pooled_embed.fc2": "time_text_embed.text_embedder.linear_2",
    "modulation.1": "norm_out.linear",
    "head": "proj_out",
}
for _stream, (_q, _k, _v, _proj, _q_norm, _k_norm, _mlp, _norm) in _STREAMS.items():
    _ours, _theirs = f"blocks.{{i}}.{_stream}", "transformer_blocks.{i}"
    FLUX |= {
        f"{_ours}.qkv": tuple(f"{_theirs}.attn.{name}" for name in (_q, _k, _v)),
        f"{_ours}.proj": f"{_theirs}.attn.{_proj}",
        f"{_ours}.q_norm": f"{_theirs}.attn.{_q_norm}",
        f"{_ours}.k_norm": f"{_theirs}.attn.{_k_norm}",
        f"{_ours}.mlp.fc1": f"{_theirs}.{_mlp}.net.0.proj",
        f"{_ours}.mlp.fc2": f"{_theirs}.{_mlp}.net.2",
        f"{_ours}.modulation.1": f"{_theirs}.{_norm}.linear",
    }
FLUX_SINGLE = {
    "blocks.{i}.image.qkv": tuple(f"single_transformer_blocks.{{i}}.attn.to_{name}" for name in "qkv"),
    "blocks.{i}.image.q_norm": "single_transformer_blocks.{i}.attn.norm_q",
    "blocks.{i}.image.k_norm": "single_transformer_blocks.{i}.attn.norm_k",
    "blocks.{i}.image.mlp.fc1": "single_transformer_blocks.{i}.proj_mlp",
    "blocks.{i}.image.modulation.1": "single_transformer_blocks.{i}.norm.linear",
}


def renamed(theirs, table, depth, first=0, **names):
    """Convert another model's weights to our names. Block {i} becomes our block {i} + first."""
    found = {}
    for ours, sources in table.items():
        sources = (sources,) if isinstance(sources, str) else sources
        for i in range(depth if "{i}" in ours else 1):
            for suffix in (".weight", ".bias", ""):
                keys = [source.format(i=i, **names) + suffix for source in sources]
                if keys[0] in theirs:
                    found[ours.format(i=i + first) + suffix] = torch.cat([theirs[key] for key in keys])
    return found


def load(model, state, channels_last=True):
    """Load all parameters. Patch embeddings and tables get our shapes, and the head our order (channels, patch)."""
    own = dict(model.named_parameters())
    assert state.keys() == own.keys()
    for name in ("head.weight", "head.bias") if channels_last else ():
        state[name] = state[name].unflatten(0, (-1, model.out_chans)).transpose(0, 1).flatten(0, 1)
    model.load_state_dict({name: value.reshape(own[name].shape) for name, value in state.items()}, strict=False)
    return model.eval()


def randomized(model, seed=0):
    torch.manual_seed(seed)
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    return model.eval()


def latents(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, *shape, generator=generator), torch.tensor([7, 31])


def caption(width, length=5):
    generator = torch.Generator().manual_seed(2)
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, 3:] = False
    return torch.randn(2, length, width, generator=generator), mask


def agree(found, expected):
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_dit():
    diffusers = pytest.importorskip("diffusers")
    theirs = randomized(
        diffusers.DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
            num_embeds_ada_norm=10, norm_eps=1e-6,
        )
    )  # fmt: skip
    embedding = theirs.transformer_blocks[0].norm1.emb
    theirs.transformer_blocks[1].norm1.emb.load_state_dict(embedding.state_dict())  # published weights repeat it
    ours = DiT(
        in_chans=4, out_chans=8, embed_dim=32, depth=2, num_heads=2, mlp="gelu_tanh", qk_norm="none",
        absolute="sincos_dit", text_encoder=LabelEncoder(10, 32), pooled_projection="none",
    )  # fmt: skip
    ours.time.base = 1e4 ** (128 / 127)  # diffusers' frequencies end at 1e-4
    load(ours, renamed(theirs.state_dict(), DIT, 2, b="transformer_blocks", ff="ff"))
    x, t = latents(4, 8, 8)
    labels = torch.tensor([3, 10])
    agree(ours(x, t / 1000, labels), theirs(x, t, labels).sample)


@pytest.mark.parametrize("scale", [1, 2])
@torch.no_grad()
def test_pixart(scale):
    diffusers = pytest.importorskip("diffusers")
    theirs = randomized(
        diffusers.PixArtTransformer2DModel(
            num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=16,
            cross_attention_dim=32, caption_channels=12, interpolation_scale=scale, use_additional_conditions=False,
        )
    )  # fmt: skip
    ours = DiT(
        in_chans=4, out_chans=8, embed_dim=32, depth=2, num_heads=2, mlp="gelu_tanh", qk_norm="none",
        absolute="sincos_dit", modulation="shared", text_width=12, text_attention="cross", cross_norm=False,
        text_projection="mlp",
    )  # fmt: skip
    ours.reference = (8 / scale, 8 / scale)
    load(ours, renamed(theirs.state_dict(), PIXART, 2, b="transformer_blocks", ff="ff"))
    (x, t), (features, mask) = latents(4, 16, 16), caption(12)
    expected = theirs(x, features, t, encoder_attention_mask=mask).sample
    agree(ours(x, t / 1000, Text(features, mask)), expected)


@pytest.mark.parametrize("patch_size", [(1, 2, 2), (2, 2, 1)])
@torch.no_grad()
def test_wan(patch_size):
    diffusers = pytest.importorskip("diffusers")
    theirs = randomized(
        diffusers.WanTransformer3DModel(
            patch_size=patch_size, num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=6,
            text_dim=12, ffn_dim=80, num_layers=2,
        )
    )  # fmt: skip
    ours = DiT(
        num_axes=3, in_chans=4, out_chans=6, patch_size=patch_size, embed_dim=32, depth=2, num_heads=2, mlp_ratio=2.5,
        mlp="gelu_tanh", qk_norm="heads", encoding="wan", modulation="shared", text_width=12, text_attention="cross",
        text_projection="mlp",
    )  # fmt: skip
    load(ours, renamed(theirs.state_dict(), WAN, 2, b="blocks", ff="ffn"))
    (x, t), (features, _) = latents(4, 4, 6, 8), caption(12)
    agree(ours(x, t / 1000, Text(features)), theirs(x, t, features).sample)


@torch.no_grad()
def test_flux():
    """FLUX has joint blocks, then parallel single-stream blocks. We split the latter's shared output projection."""
    diffusers = pytest.importorskip("diffusers")
    theirs = randomized(
        diffusers.FluxTransformer2DModel(
            in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
            joint_attention_dim=12, pooled_projection_dim=10, axes_dims_rope=(4, 14, 14),
        )
    )  # fmt: skip
    ours = DiT(
        in_chans=4, embed_dim=64, depth=4, num_heads=2, mlp="gelu_tanh", encoding="flux1", text_width=12,
        pooled_width=10, pooled_projection="mlp", text_attention=["joint"] * 2 + ["single"] * 2,
        parallel=[False] * 2 + [True] * 2,
    )  # fmt: skip
    weights = theirs.state_dict()
    state = renamed(weights, FLUX, 2) | renamed(weights, FLUX_SINGLE, 2, first=2)
    for i in range(2):
        stream, out = f"blocks.{i + 2}.image", f"single_transformer_blocks.{i}.proj_out"
        attended, mlp = weights[f"{out}.weight"].split([64, 256], dim=1)
        state |= {f"{stream}.proj.weight": attended, f"{stream}.mlp.fc2.weight": mlp}
        state |= {f"{stream}.proj.bias": weights[f"{out}.bias"], f"{stream}.mlp.fc2.bias": torch.zeros(64)}
    for name in ("modulation.1.weight", "modulation.1.bias"):
        state[name] = state[name].roll(64, 0)  # the original's order is scale, shift
    load(ours, state, channels_last=False)
    (x, t), (features, _) = latents(4, 8, 6), caption(12)
    pooled = torch.randn(2, 10)
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(3.0))
    expected = theirs(patchify(x, (2, 2)), features, pooled, t / 1000, img_ids=places, txt_ids=torch.zeros(5, 3)).sample
    agree(ours(x, t / 1000, Text(features, None, pooled)), unpatchify(expected, (4, 3), (2, 2)))


class SiTBlock(nn.Module):
    def __init__(self, dim, heads, lightning):
        super().__init__()
        self.heads, self.lightning = heads, lightning
        norm = nn.RMSNorm(dim, eps=1e-6) if lightning else nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.norm1 = norm
        self.norm2 = nn.RMSNorm(dim, eps=1e-6) if lightning else norm
        self.attn = nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim), "proj": nn.Linear(dim, dim)})
        if lightning:
            self.attn.update({name: nn.RMSNorm(dim // heads, eps=1e-6) for name in ("q_norm", "k_norm")})
            hidden = 2 * 4 * dim // 3
            self.mlp = nn.ModuleDict({"w12": nn.Linear(dim, 2 * hidden), "w3": nn.Linear(hidden, dim)})
        else:
            self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, 4 * dim), "fc2": nn.Linear(4 * dim, dim)})
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x, c, angles):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c)[:, None].chunk(6, dim=-1)
        x = x + gate1 * self.attend(self.norm1(x) * (1 + scale1) + shift1, angles)
        x = self.norm2(x) * (1 + scale2) + shift2, x
        if self.lightning:
            a, b = self.mlp["w12"](x[0]).chunk(2, dim=-1)
            return x[1] + gate2 * self.mlp["w3"](F.silu(a) * b)
        return x[1] + gate2 * self.mlp["fc2"](F.gelu(self.mlp["fc1"](x[0]), approximate="tanh"))

    def attend(self, x, angles):
        q, k, v = self.attn["qkv"](x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.lightning:
            turn = torch.polar(torch.ones_like(angles), angles)
            q, k = (
                torch.view_as_real(torch.view_as_complex(self.attn[name](y).unflatten(-1, (-1, 2))) * turn).flatten(-2)
                for name, y in (("q_norm", q), ("k_norm", k))
            )
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        return self.attn["proj"]((weights @ v).transpose(1, 2).flatten(2))


class SiT(nn.Module):
    """SiT (arXiv 2401.08740), which has DiT's blocks.

    ``lightning`` adds RMSNorm, SwiGLU, qk-norm and RoPE (LightningDiT, arXiv 2501.01423).
    """

    def __init__(self, dim=32, depth=2, heads=2, lightning=False):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.x_embedder = nn.ModuleDict({"proj": nn.Conv2d(4, dim, 2, 2)})
        self.t_embedder = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))})
        self.y_embedder = nn.ModuleDict({"embedding_table": nn.Embedding(11, dim)})
        self.blocks = nn.ModuleList(SiTBlock(dim, heads, lightning) for _ in range(depth))
        norm = nn.RMSNorm(dim, eps=1e-6) if lightning else nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.final_layer = nn.ModuleDict({
            "norm_final": norm, "linear": nn.Linear(dim, 16),
            "adaLN_modulation": nn.Sequential(nn.SiLU(), nn.Linear(dim, 2 * dim)),
        })  # fmt: skip

    def forward(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        height, width = x.shape[-2] // 2, x.shape[-1] // 2
        rows, columns = torch.cartesian_prod(torch.arange(float(height)), torch.arange(float(width))).unbind(1)
        quarter = 1e4 ** -(torch.arange(self.dim // 4) / (self.dim // 4))
        table = [f(place[:, None] * quarter) for place in (columns, rows) for f in (torch.sin, torch.cos)]
        x = self.x_embedder["proj"](x).flatten(2).mT + torch.cat(table, dim=-1)
        angles = 1000 * t[:, None] * 1e4 ** -(torch.arange(128) / 128)
        c = self.t_embedder["mlp"](torch.cat([angles.cos(), angles.sin()], dim=-1))
        c = c + self.y_embedder["embedding_table"](labels)
        pairs = self.dim // self.heads // 4  # of an axis
        omega = 1e4 ** -(torch.arange(pairs) / pairs)
        turn = torch.cat([rows[:, None] * omega, columns[:, None] * omega], dim=-1)
        for block in self.blocks:
            x = block(x, c, turn)
        shift, scale = self.final_layer["adaLN_modulation"](c)[:, None].chunk(2, dim=-1)
        x = self.final_layer["linear"](self.final_layer["norm_final"](x) * (1 + scale) + shift)
        return x.unflatten(1, (height, width)).unflatten(-1, (2, 2, 4)).permute(0, 5, 1, 3, 2, 4).reshape(
            -1, 4, 2 * height, 2 * width
        )  # fmt: skip


@pytest.mark.parametrize("lightning", [False, True])
@torch.no_grad()
def test_sit(lightning):
    theirs = randomized(SiT(dim=48, lightning=lightning))
    blocks = (
        {"mlp": "swiglu", "mlp_ratio": 8 / 3, "norm": "rms", "encoding": "eva02"}
        if lightning
        else {"mlp": "gelu_tanh", "qk_norm": "none"}
    )
    ours = DiT(
        in_chans=4, embed_dim=48, depth=2, num_heads=2, absolute="sincos_dit", text_encoder=LabelEncoder(10, 48),
        pooled_projection="none", **blocks,
    )  # fmt: skip
    if lightning:
        ours.reference = (4, 6)
    names = {"fc1": "w12", "fc2": "w3"} if lightning else {"fc1": "fc1", "fc2": "fc2"}
    load(ours, renamed(theirs.state_dict(), SIT, 2, **names))
    x, t = latents(4, 8, 12)
    labels = torch.tensor([3, 10])
    agree(ours(x, t / 1000, labels), theirs(x, t / 1000, labels))
