"""Independent float64 implementation of the formula in plain PyTorch, with explicit pairs of tokens.

    Θ[n, h, c] = Σ_j s_j[n] ω[h, c, j] + φ[h, c] on the grid, 0 for prefix and suffix        x̄ = act(norm(x))
    cosine   [x̄ cos Θ, x̄ sin Θ]           rotate   (a, b) → (a cos Θ - b sin Θ, a sin Θ + b cos Θ)
    o_n = Σ_m [n sees m] β_m (q̂_n · k̂_m) v_m / z_n
    with a memory that forgets, block by block: S_f = g_f (I − [delta] Σ β k̂ k̂ᵀ) S_{f−1} + Σ β k̂ vᵀ

This implementation follows the documentation, not the reference implementation. Gradients come from autograd. A
:class:`Rounding` adds random errors after each step in which an implementation may round. check.py measures the effect
of these errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .configs import Config, LinearConfig, MapConfig, NormConfig, Where


def _draw_errors(x: Tensor) -> Tensor:
    """Draw random errors. One part is the same for all tokens, because equal tokens are rounded identically."""
    own = torch.randn_like(x)
    return own if x.ndim < 3 else own + torch.randn_like(x[..., :1, :])


class _Perturb(torch.autograd.Function):
    """Add random relative errors to a tensor and to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, level: float, backward: float) -> Tensor:
        ctx.level = backward
        return x * (1 + level * _draw_errors(x)) if level else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        return grad * (1 + ctx.level * _draw_errors(grad)) if ctx.level else grad, None, None


class Rounding(NamedTuple):
    """Standard deviations of the relative errors in single steps. 0 means exact."""

    arithmetic: float = 0.0
    operand: float = 0.0  # operands of matrix products
    result: float = 0.0  # results stored between two launches
    parameters: Mapping[str, float] = MappingProxyType({})  # error in the gradient that a launch stores, by parameter

    def perturb(self, x: Tensor, level: str = "arithmetic", backward: str | None = None) -> Tensor:
        if not self.arithmetic:
            return x
        return _Perturb.apply(x, getattr(self, level), getattr(self, backward or level))  # pyright: ignore

    def read(self, t: dict[str, Tensor], name: str) -> Any:
        """Return a parameter for a single launch. The launch rounds its contribution to the parameter's gradient."""
        x = t.get(name)
        return x if x is None or not self.arithmetic else _Perturb.apply(x, 0.0, self.parameters[name])

    def perturb_angle(self, theta: Tensor, reach: Tensor) -> Tensor:
        """Add rounding errors to angles: a float32 error within a turn, and a float64 error relative to ``reach``."""
        if not self.arithmetic:
            return theta
        noise = torch.randn_like(theta) * (4 * self.arithmetic + 2**-52 * reach)
        return self.perturb(theta + noise * (theta != 0), "exact", "arithmetic")

    @property
    def exact(self) -> float:
        return 0.0


EXACT = Rounding()


def share(t: Tensor, heads: int) -> Tensor:
    """Repeat (..., H or 1, N, C) to (..., heads, N, C), where head h uses row h // (heads / H)."""
    return t.repeat_interleave(heads // t.shape[-3], dim=-3)


# --- the maps -------------------------------------------------------------------------------------------------------


def normalise(x: Tensor, norm: NormConfig, weight: Any, bias: Any, part: Tensor, r: Rounding) -> Tensor:
    """Apply a norm to each head separately, or to all heads together."""
    over = (-1,) if norm.over == "head" else (-3, -1)
    if norm.kind == "layer":
        x = r.perturb(x, "exact", "arithmetic") - r.perturb(r.perturb(x).mean(over, keepdim=True))
    scale = r.perturb((x.square().mean(over, keepdim=True) + norm.eps).rsqrt())
    x = r.perturb(r.perturb(x, "exact", "arithmetic") * scale)

    def by_token(t: Tensor) -> Tensor:
        if t.ndim == 3:
            return t[part].movedim(0, 1)  # (H or 1, N, D)
        return t[:, None] if t.ndim == 2 else t

    if weight is not None:
        x = r.perturb(x * (by_token(weight) + norm.offset))
    return x if bias is None else r.perturb(x + by_token(bias))


def activate(x: Tensor, act: str, dim: int | None, r: Rounding) -> Tensor:
    """Apply the activation."""
    if act == "softmax" and x.numel():
        assert dim is not None
        e = torch.exp(x - x.detach().amax(dim, keepdim=True))
        return r.perturb(e) / r.perturb(r.perturb(e).sum(dim, keepdim=True))
    if act in ("sigmoid", "silu"):
        s = r.perturb(1 / (1 + torch.exp(-x)))
        return x * s if act == "silu" else s
    return {"none": x, "softmax": x, "relu": x * (x > 0), "softplus": torch.logaddexp(x, torch.zeros_like(x))}[act]


def form_cos_sin(
    where: Where, omega: Tensor, phase: Any, amplitude: Any, heads: int, r: Rounding
) -> tuple[Tensor, Tensor]:
    """Return cos Θ and sin Θ times the amplitude, each (B or 1, heads, N, C)."""
    on_grid = where.on_grid[:, None, :, None]
    theta = torch.einsum("bnk,hck->bhnc", where.coords, omega)
    reach = torch.einsum("bnk,hck->bhnc", where.coords.abs(), omega.abs())
    if phase is not None:
        theta = theta + phase[:, None]
    theta = r.perturb_angle(torch.where(on_grid, theta, 0), reach)
    gain = torch.ones((), dtype=theta.dtype, device=theta.device) if amplitude is None else amplitude
    gain = gain[:, None] if gain.ndim == 2 else gain
    gain = torch.where(on_grid, gain, 1)
    cos, sin = r.perturb(theta.cos()), r.perturb(theta.sin())
    return share(cos * gain, heads), share(sin * gain, heads)


def pair_channels(pairs: Any, start: int, channels: int) -> tuple[list[int], list[int]]:
    """Return the first and the second channel of each pair."""
    if pairs == "interleaved":
        return [start + 2 * p for p in range(channels)], [start + 2 * p + 1 for p in range(channels)]
    first, second, begin = [], [], start
    for size in [channels] if pairs == "half" else pairs:
        first += range(begin, begin + size)
        second += range(begin + size, begin + 2 * size)
        begin += 2 * size
    return first, second


def apply_map(c: Config, x: Tensor, angles: list[tuple[Tensor, Tensor]], r: Rounding) -> Tensor:
    """Map x̄ to x̂. The cosine map concatenates the groups of phases."""
    start, width = c.part
    if c.map == "cosine":
        middle = []
        for cos, sin in angles:
            own = r.perturb(x[..., start : start + width], "exact", "result")
            both = [own * cos, own * sin] if c.order == "cos_sin" else [own * sin, own * cos]
            middle.append(r.perturb(torch.cat(both, -1), "exact", "result"))
        repeats = c.groups // len(angles) if isinstance(c, MapConfig) else 1
        return torch.cat([x[..., :start], *middle * repeats, x[..., start + width :]], -1)
    if c.map is None:
        return x
    ((cos, sin),) = angles
    first, second = (torch.tensor(i, device=x.device) for i in pair_channels(c.pairs, start, c.channels))
    a, b = x[..., first], x[..., second]
    return x.index_copy(-1, first, a * cos - b * sin).index_copy(-1, second, a * sin + b * cos)


def encode(c: Config, x: Tensor, where: Where, t: dict[str, Tensor], side: str, r: Rounding) -> tuple[Tensor, Tensor]:
    """Return x̄ (B, H, N, D) and x̂ (B, H, N, Ê) of q or k."""
    if c.norm is not None:
        own = side if c.norm.pair else "q"
        x = normalise(x, c.norm, r.read(t, f"weight_{own}"), r.read(t, f"bias_{own}"), where.part, r)
    if c.dim == -2 or (c.norm is not None and c.norm.over == "heads"):
        x = r.perturb(x, "result")
    x_bar = r.perturb(activate(x, c.act, c.dim, r))
    if c.map is None:
        return x_bar, x_bar
    if isinstance(c, LinearConfig) and c.dim == -2:
        x_bar = r.perturb(x_bar, "result")
    phase = r.read(t, "phase_q" if c.phase == "shared" else f"phase_{side}")
    sign = -1 if isinstance(c, MapConfig) and c.inverse else 1
    phases = list(phase.unbind()) if phase is not None and phase.ndim == 3 else [phase]
    angles = [
        form_cos_sin(
            where, sign * r.read(t, "omega"), None if phi is None else sign * phi, t.get("amplitude"), x.shape[1], r
        )
        for phi in phases
    ]
    return x_bar, apply_map(c, x_bar, angles, r)


def encode_all(c: MapConfig, xs: list[Tensor], wheres: list[Where], t: dict[str, Tensor], r: Rounding) -> list[Tensor]:
    """Encode one tensor, or q and k."""
    return [encode(c, x, where, t, side, r)[1] for x, where, side in zip(xs, wheres, "qk", strict=False)]


# --- linear attention -----------------------------------------------------------------------------------------------


def number_blocks(c: LinearConfig, where: Where) -> Tensor:
    """Return the block number of each token. Prefix and suffix are separate blocks."""
    return torch.where(where.part == 1, where.index.clamp_min(0) // c.block, torch.where(where.part == 0, -1, 1 << 40))


def make_mask(c: LinearConfig, q: Where, k: Where, sequence: Tensor) -> Tensor:
    """Return a mask (N_q, N_k) that is True where a query attends to a key."""
    if c.mask == "block":
        number = number_blocks(c, k)
        return number[:, None] >= number
    if c.mask == "causal":
        order = torch.arange(len(k.part), device=sequence.device)
        return (order[:, None] >= order) & (sequence[:, None] == sequence)
    if c.lengths is not None:
        return sequence[:, None] == sequence
    return torch.ones(len(q.part), len(k.part), dtype=torch.bool, device=sequence.device)


def attend(c: LinearConfig, t: dict[str, Tensor], wheres: tuple[Where, Where], r: Rounding) -> dict[str, Tensor]:
    """Return o, the state (S, sums) after the last token, and z if there is a normaliser."""
    q, k, v, gate = t["q"], t["k"], t["v"], t.get("gate")
    beta = torch.ones((1, 1, k.shape[2], 1), dtype=q.dtype, device=q.device) if gate is None else gate[..., None]
    if gate is not None:  # a gate of 0 removes even a NaN token, and gets no gradient
        k, v, beta = (torch.where(beta == 0, 0, x) for x in (k, v, beta))
    q_bar, q_hat = encode(c, q, wheres[0], t, "q", r)
    k_bar, k_hat = encode(c, k, wheres[1], t, "k", r)
    keys = Keys(k_hat, k_bar if c.normalizer == "unrotated" else k_hat, beta)
    k_bar, k_hat = beta * k_bar, beta * k_hat
    # Each tensor is used twice, and its two gradients may be rounded before they are summed.
    feature_q, feature_k = (q_bar, k_bar) if c.normalizer == "unrotated" else (q_hat, k_hat)
    feature_q, feature_k = r.perturb(feature_q), r.perturb(feature_k)
    q_hat, k_hat, v = r.perturb(q_hat, "operand"), r.perturb(k_hat, "operand"), r.perturb(v, "operand")
    lengths = torch.tensor(c.lengths or (k.shape[2],), device=q.device)
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=q.device), lengths)
    if c.forgets and c.mask == "block":
        found = recur(c, t, (q_hat, feature_q), keys, v, wheres[0], r)
    else:
        found = sum_pairs(c, t, (q_hat, feature_q), (k_hat, feature_k, v), wheres, sequence, r)
    rows, z, after_S, after_sums = found
    if c.normalizer == "none":
        return {"o": r.perturb(rows), "S": after_S}
    if c.normalizer == "unrotated":
        o = rows / torch.where(z > c.eps, z, c.eps)
    else:
        small = z.abs() < c.eps
        o = torch.where(small, 0, rows / torch.where(small, 1, z))
    return {"o": r.perturb(o), "S": after_S, "sums": after_sums, "z": z}


Found = tuple[Tensor, Tensor, Tensor, Tensor]  # output rows, z, and the state after the last token


def sum_pairs(
    c: LinearConfig, t: dict[str, Tensor], queries: Any, keys: Any, wheres: tuple[Where, Where], sequence: Tensor,
    r: Rounding,
) -> Found:  # fmt: skip
    """Compute attention without decay by summing over pairs of tokens (N_q, N_k)."""
    (q_hat, feature_q), (k_hat, feature_k, v), packed = queries, keys, c.lengths is not None
    heads, num_seqs = q_hat.shape[1], len(c.lengths or (0,))
    member = torch.nn.functional.one_hot(sequence, num_seqs).to(q_hat.dtype).T  # (sequences, N_k)
    mask = make_mask(c, *wheres, sequence)
    one = q_hat.new_ones(1, 1, 1, 1)
    fade = fade_tokens(t, mask, member, sequence, r) if c.forgets else Fade(one, one, one, one[0])
    own_S = torch.einsum("bhne,bhnv,sn->sbhev", fade.to_end * k_hat, v, member)
    own_sums = torch.einsum("bhne,sn->sbhe", fade.to_end * feature_k, member)
    S, sums = (
        t[n].unsqueeze(int(packed)) if n in t else torch.zeros_like(own)
        for n, own in (("S", own_S), ("sums", own_sums))
    )

    def read_state(queries: Tensor, states: Tensor) -> Tensor:
        """Multiply each query by the state of its sequence."""
        of_query = member[:, :, None] if packed else torch.ones_like(queries[0, :1, :, :1])
        products = [m * (queries @ share(state, heads)) for m, state in zip(of_query, states, strict=True)]
        return share(fade.from_start, heads) * torch.stack(products).sum(0)

    between = share(fade.between, heads)
    weights = r.perturb(torch.where(mask, (q_hat @ share(k_hat, heads).mT) * between, 0), "operand")
    rows = weights @ share(v, heads) + read_state(q_hat, r.perturb(S, "operand"))
    if r.arithmetic:  # rounding in implementations that sum the state over the keys that a query attends to
        seen = mask.sum(-1, keepdim=True) / max(mask.shape[1], 1)
        rows = rows + seen * read_state(q_hat, r.perturb(own_S, "operand") - own_S)
    rows = r.perturb(rows, "exact", "operand")
    after_S, after_sums = (
        r.perturb(fade.whole.reshape(*fade.whole.shape, *(1,) * (x.ndim - 3)) * x + own).squeeze(int(packed))
        for x, own in ((S, own_S), (sums, own_sums))
    )  # fmt: skip
    z = torch.where(mask, (feature_q @ share(feature_k, heads).mT) * between, 0).sum(-1, keepdim=True)
    z = r.perturb(z + read_state(feature_q, sums[..., None]))
    return rows, z, after_S, after_sums


BLOCK = 64  # largest number of tokens in a block of the causal kernels


class Fade(NamedTuple):
    """Products of decays over ranges of tokens."""

    between: Tensor  # (B, H, N_q, N_k): after the key, up to the query
    from_start: Tensor  # (B, H, N, 1): from the sequence's start up to the token
    to_end: Tensor  # (B, H, N, 1): from after the token to the sequence's end
    whole: Tensor  # (sequences, B, H): over the whole sequence


def fade_tokens(t: dict[str, Tensor], mask: Tensor, member: Tensor, sequence: Tensor, r: Rounding) -> Fade:
    decay = t["decay"][None, :, None] if t["decay"].ndim == 1 else t["decay"]
    logs = decay.log().expand(-1, -1, len(sequence))
    upto = logs.cumsum(-1)
    first = torch.arange(len(sequence), device=upto.device) // BLOCK * BLOCK
    before = (upto - logs)[..., first]
    upto = before + r.perturb(upto - before)  # kernels subtract sums of logarithms within a block
    total = torch.einsum("bhn,sn->sbh", logs, member)
    ends = total.cumsum(0).movedim(0, -1)[..., sequence]  # up to the end of each token's sequence
    begins = ends - total.movedim(0, -1)[..., sequence]
    between = torch.where(mask, upto[..., :, None] - upto[..., None, :], 0)
    sums = between, (upto - begins)[..., None], (ends - upto)[..., None], total
    return Fade(*(r.perturb(r.perturb(x).exp()) for x in sums))


class Keys(NamedTuple):
    """Encoded keys k̂, the keys' features for the normaliser, and the gate β."""

    hat: Tensor
    feature: Tensor
    beta: Tensor


class Block(NamedTuple):
    """Group of tokens that are added to the state together."""

    begin: int
    end: int
    number: int | None  # index of the block's decay, if any


def list_blocks(c: LinearConfig, where: Where) -> list[Block]:
    number = number_blocks(c, where)
    values, counts = number.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    on_grid = (values >= 0) & (values < 1 << 40)
    order = on_grid.long().cumsum(0) - 1
    rows = zip((ends - counts).tolist(), ends.tolist(), order.tolist(), on_grid.tolist(), strict=True)
    return [Block(begin, end, n if inside else None) for begin, end, n, inside in rows]


def recur(
    c: LinearConfig, t: dict[str, Tensor], queries: Any, keys: Keys, v: Tensor, where: Where, r: Rounding
) -> Found:  # fmt: skip
    """Compute attention with a memory, one block after another."""
    (q_hat, feature_q), heads = queries, queries[0].shape[1]
    batch, key_heads = v.shape[:2]
    blocks = list_blocks(c, where)
    decay = t.get("decay")
    if decay is not None:
        decay = decay[None, :, None] if decay.ndim == 1 else decay

    def zeros() -> tuple[Tensor, Tensor]:
        S = q_hat.new_zeros(batch, key_heads, keys.hat.shape[3], v.shape[3])
        return S, q_hat.new_zeros(batch, key_heads, keys.feature.shape[3], 1)

    def enter(state: tuple[Tensor, Tensor], block: Block) -> tuple[Tensor, Tensor]:
        here = slice(block.begin, block.end)
        g: Any = 1.0
        if decay is not None and block.number is not None:
            at = min(block.number, decay.shape[2] - 1)
            g = decay[:, :, at, None, None]
        found = []
        for old, x, y in zip(state, (keys.hat, keys.feature), (v, torch.ones_like(v[..., :1])), strict=True):
            x, y = x[:, :, here], y[:, :, here]
            beta = keys.beta[:, :, here]
            weighted = r.perturb(r.perturb(beta * x, "operand"))
            if c.rule == "delta":
                A = r.perturb(weighted.mT @ r.perturb(x, "operand"), "arithmetic", "operand")
                old = old - r.perturb(A @ old)
            new = r.perturb(weighted.mT @ y, "arithmetic", "operand")
            found.append(r.perturb(g * old + new))
        return found[0], found[1]

    state = zeros()
    if "S" in t:
        state = t["S"], t["sums"][..., None] if "sums" in t else state[1]
    seen = []
    for block in blocks:
        state = enter(state, block)
        seen.append(state)
    if c.directions == "both":
        later = zeros()
        for i in reversed(range(len(blocks))):
            seen[i], later = tuple(a + b for a, b in zip(seen[i], later, strict=True)), enter(later, blocks[i])
    rows, z = [q_hat[:, :, :0, :1] * v.new_zeros(v.shape[3])], [feature_q[:, :, :0, :1]]
    for block, (S, sums) in zip(blocks, seen, strict=True):
        here = slice(block.begin, block.end)
        rows.append(q_hat[:, :, here] @ share(r.perturb(S, "operand"), heads))
        z.append(feature_q[:, :, here] @ share(sums, heads))
    rows, z = r.perturb(torch.cat(rows, 2), "exact", "operand"), r.perturb(torch.cat(z, 2))
    return rows, z, state[0], state[1][..., 0]
