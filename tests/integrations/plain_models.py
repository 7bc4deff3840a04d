"""Small models without relative positions, in the style of DiT, SiT, U-ViT, MAE and nanoGPT, with edited twins.

A twin has the same weights and names, and an ``encoding``: its forwards pass the positions on to the attention modules,
which encode q and k themselves. ``checkpointing`` is None, or ``use_reentrant`` of a checkpoint around each block.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from lrpe_md import Grid
from lrpe_md.integrations import set_positions
from lrpe_md.integrations.encoding import EncodingStack

DIM, HEADS, DEPTH = 32, 2, 2


def encode(model, i, q, k, positions):
    """Encode q and k as layer i of an edited model does, with the scale of the original head_dim."""
    return EncodingStack(model.encoding)[i](q, k, positions=positions), q.shape[-1] ** -0.5


def shift(x):
    """Stand-in for other code in the file of an attention module."""
    return x


class Attention(nn.Module):
    def __init__(self, dim=DIM, num_heads=HEADS):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def split(self, x):
        return self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        q, k, v = self.split(shift(x))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class EditedAttention(Attention):
    def forward(self, x, where):
        q, k, v = self.split(shift(x))
        (q, k), scale = encode(where[0], where[1], q, k, where[2])
        return self.proj(F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2))


class Runs(nn.Module):
    """Model that runs its blocks. If the model has checkpointing, each block runs under a checkpoint."""

    checkpointing = None

    def run(self, block, *args):
        if self.checkpointing is None:
            return block(*args)
        return checkpoint(self.wrap(block), *args, use_reentrant=self.checkpointing)

    def wrap(self, block):
        def run(*args):
            return block(*args)

        return run


# --- DiT and SiT -----------------------------------------------------------------------------------------------------


class DitBlock(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(DIM, elementwise_affine=False)
        self.attn = attention(DIM, num_heads=HEADS)
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 4 * DIM))

    def forward(self, x, c, *where):
        scale1, gate1, scale2, gate2 = self.modulation(c)[:, None].chunk(4, dim=-1)
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1), *where)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2))


class Dit(Runs):
    patch = 2
    attention: type = Attention

    def __init__(self):
        super().__init__()
        self.x_embedder = nn.Conv2d(3, DIM, self.patch, self.patch)
        self.t_embedder, self.y_embedder = nn.Linear(1, DIM), nn.Embedding(4, DIM)
        self.blocks = nn.ModuleList(DitBlock(self.attention) for _ in range(DEPTH))
        self.final = nn.Linear(DIM, 3 * self.patch**2)

    def embed(self, x, t, y):
        return self.x_embedder(x).flatten(2).mT, self.t_embedder(t[:, None]) + self.y_embedder(y)

    def forward(self, x, t, y):
        x, c = self.embed(x, t, y)
        for block in self.blocks:
            x = self.run(block, x, c)
        return self.final(x)

    def forward_with_cfg(self, x, t, y):
        """Run guidance like samplers, without ``__call__``."""
        return self.forward(torch.cat([x, x]), torch.cat([t, t]), torch.cat([y, y * 0]))


class EditedDit(Dit):
    attention = EditedAttention

    def forward(self, x, t, y):
        grid = Grid((x.shape[2] // self.patch, x.shape[3] // self.patch))
        x, c = self.embed(x, t, y)
        for i, block in enumerate(self.blocks):
            x = self.run(block, x, c, (self, i, grid))
        return self.final(x)


def dit_inputs(size):
    return torch.randn(2, 3, *size), torch.rand(2), torch.tensor([1, 3])


def dit_positions(x, t, y):
    return Grid((x.shape[2] // 2, x.shape[3] // 2))


def sit(edited):
    """Build a SiT, which has DiT's blocks with timm's attention."""
    from timm.layers.attention import Attention as TimmAttention

    class EditedTimmAttention(TimmAttention):
        def forward(self, x, where):
            q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
            (q, k), scale = encode(where[0], where[1], q, k, where[2])
            x = F.scaled_dot_product_attention(q, k, v, scale=scale)
            return self.proj(x.transpose(1, 2).flatten(2))

    class Sit(EditedDit if edited else Dit):
        patch = 1
        attention = EditedTimmAttention if edited else TimmAttention

    return Sit()


def sit_positions(x, t, y):
    return Grid(tuple(x.shape[2:]))


# --- U-ViT -----------------------------------------------------------------------------------------------------------


class UvitAttention(Attention):
    def forward(self, x):
        q, k, v = self.split(x)
        x = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).flatten(2))


class UvitBlock(nn.Module):
    def __init__(self, attention, skip):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(DIM), attention()
        self.skip_linear = nn.Linear(2 * DIM, DIM) if skip else None

    def forward(self, x, skip, *where):
        if self.skip_linear is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=-1))
        return x + self.attn(self.norm(x), *where)


class Uvit(Runs):
    """U-ViT, with time and label tokens before the patches, and skip connections from early blocks to late ones."""

    attention: type = UvitAttention

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, DIM, 2, 2)
        self.time_embed, self.label_emb = nn.Linear(1, DIM), nn.Embedding(4, DIM)
        self.in_blocks = nn.ModuleList([UvitBlock(self.attention, False)])
        self.mid_block = UvitBlock(self.attention, False)
        self.out_blocks = nn.ModuleList([UvitBlock(self.attention, True)])

    def embed(self, x, t, y):
        return torch.cat(
            [self.time_embed(t[:, None])[:, None], self.label_emb(y)[:, None], self.patch_embed(x).flatten(2).mT], 1
        )

    def blocks_in_order(self):
        return [*self.in_blocks, self.mid_block, *self.out_blocks]

    def forward(self, x, t, y, **others):
        x = self.embed(x, t, y)
        skip = first = self.run(self.in_blocks[0], x, x)
        x = self.run(self.mid_block, skip, skip)
        return self.run(self.out_blocks[0], x, first)


class EditedUvit(Uvit):
    attention = EditedAttention

    def forward(self, x, t, y, **others):
        grid = Grid((x.shape[2] // 2, x.shape[3] // 2), prefix=2)
        x = self.embed(x, t, y)
        skip = first = self.run(self.in_blocks[0], x, x, (self, 0, grid))
        x = self.run(self.mid_block, skip, skip, (self, 1, grid))
        return self.run(self.out_blocks[0], x, first, (self, 2, grid))


def uvit_positions(x, t, y):
    return Grid((x.shape[2] // 2, x.shape[3] // 2), prefix=2)


# --- MAE -------------------------------------------------------------------------------------------------------------


class MaeBlock(nn.Module):
    def __init__(self, attention, num_heads=HEADS):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(DIM), attention(num_heads=num_heads)

    def forward(self, x, *where):
        return x + self.attn(self.norm(x), *where)


class MaeAttention(Attention):
    def forward(self, x):
        q, k, v = self.split(x)
        return self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mae(Runs):
    """MAE whose encoder sees the class token and the kept patches. The decoder sees all patches."""

    attention: type = MaeAttention

    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, DIM, 2, 2)
        self.cls_token, self.mask_token = (nn.Parameter(torch.randn(1, 1, DIM)) for _ in range(2))
        self.blocks = nn.ModuleList(MaeBlock(self.attention) for _ in range(DEPTH))
        self.decoder_blocks = nn.ModuleList([MaeBlock(self.attention, 4)])

    def random_masking(self, x, ratio):
        num = x.shape[1]
        noise = torch.rand(x.shape[0], num, device=x.device)
        order = noise.argsort(dim=1)
        ids_keep, ids_restore = order[:, : num - int(num * ratio)], order.argsort(dim=1)
        self.choose(ids_keep)
        return x.gather(1, ids_keep[..., None].expand(-1, -1, DIM)), ids_restore, ids_keep

    def choose(self, ids_keep):
        """Choose the patches to keep."""

    def restore(self, x, ids_restore):
        masked = self.mask_token.expand(x.shape[0], ids_restore.shape[1] + 1 - x.shape[1], -1)
        patches = torch.cat([x[:, 1:], masked], dim=1).gather(1, ids_restore[..., None].expand(-1, -1, DIM))
        return torch.cat([x[:, :1], patches], dim=1)

    def forward(self, images, ratio=0.5):
        self.size = tuple(n // 2 for n in images.shape[2:])
        x, ids_restore, _ = self.random_masking(self.patch_embed(images).flatten(2).mT, ratio)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = self.run(block, x)
        x = self.restore(x, ids_restore)
        for block in self.decoder_blocks:
            x = self.run(block, x)
        return x


class PlacedMae(Mae):
    """MAE with a user's method for adapt_attention. It draws patches, and returns the positions of the kept ones."""

    def choose(self, ids_keep):
        set_positions(self, Grid(self.size, prefix=1).take(ids_keep))


class EditedMae(Mae):
    attention = EditedAttention

    def forward(self, images, ratio=0.5):
        grid = Grid(tuple(n // 2 for n in images.shape[2:]), prefix=1)
        x, ids_restore, ids_keep = self.random_masking(self.patch_embed(images).flatten(2).mT, ratio)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        for i, block in enumerate(self.blocks):
            x = self.run(block, x, (self, i, grid.take(ids_keep)))
        x = self.restore(x, ids_restore)
        for block in self.decoder_blocks:
            x = self.run(block, x, (self.decoder, 0, grid))
        return x

    @property
    def decoder(self):
        """Return the result of ``encode``, which the decoder's encoding needs."""
        return Decoder(self.decoder_encoding)


class Decoder:
    def __init__(self, encoding):
        self.encoding = encoding


def mae_positions(images, ratio=0.5):
    return Grid(tuple(n // 2 for n in images.shape[2:]), prefix=1)


# --- nanoGPT ---------------------------------------------------------------------------------------------------------


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.n_head, self.n_embd, self.dropout = HEADS, DIM, 0.25

    def split(self, x):
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        return (t.view(*t.shape[:2], self.n_head, self.n_embd // self.n_head).transpose(1, 2) for t in (q, k, v))

    def forward(self, x):
        q, k, v = self.split(x)
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(x.shape))


class EditedCausalSelfAttention(CausalSelfAttention):
    def forward(self, x, where):
        q, k, v = self.split(x)
        (q, k), scale = encode(where[0], where[1], q, k, where[2])
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True, scale=scale
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(x.shape))


class GptBlock(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(DIM), attention()

    def forward(self, x, *where):
        return x + self.attn(self.ln_1(x), *where)


class Gpt(Runs):
    attention: type = CausalSelfAttention

    def __init__(self):
        super().__init__()
        layers = nn.ModuleList(GptBlock(self.attention) for _ in range(DEPTH))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(50, DIM), "h": layers})
        self.lm_head = nn.Linear(DIM, 50, bias=False)

    def forward(self, idx, targets=None):
        x = self.transformer["wte"](idx)
        for block in self.transformer["h"]:
            x = self.run(block, x)
        logits = self.lm_head(x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class EditedGpt(Gpt):
    attention = EditedCausalSelfAttention

    def forward(self, idx, targets=None):
        x, grid = self.transformer["wte"](idx), Grid((idx.shape[1],))
        for i, block in enumerate(self.transformer["h"]):
            x = self.run(block, x, (self, i, grid))
        logits = self.lm_head(x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def gpt_positions(idx, targets=None):
    return Grid((idx.shape[1],))
