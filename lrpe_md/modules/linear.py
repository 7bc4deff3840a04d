"""Linear attention as a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..engine.linear.call import Description, LinearOptions, NormalizerName, State
from ..engine.linear.dispatch import as_state, run_encoded
from ..engine.linear.validate import Given, check_eps, check_normalizer
from ..functional_linear import linear_attention
from ..norm import Norm

__all__ = ["LinearAttention", "attend_with"]


class LinearAttention(nn.Module):
    """:func:`lrpe_md.linear_attention` with an encoding's map, activation and frequencies.

    Args:
        encoding: a module that can say what it is made of, by ``describe()``: :class:`CosineMd`, :class:`RotateMd`,
            :class:`Rotate1d`, :class:`PresetMd`. It stays the encoding's own: frequencies that learn are parameters of
            this module too. None: no positions, and act "relu". Any other module or function, and a Rotate1d with a
            ``scale_base``, is called as
            ``encoding(q, k, positions=positions)`` and gives q̂ and k̂, which are then in memory; with "unrotated"
            its ``act`` and ``dim`` (default: none) say what q̄ and k̄ are, and all but the encoding runs in plain torch.
            A norm comes before such an encoding, in plain torch.
        normalizer, eps: see :func:`lrpe_md.linear_attention`.

    Call with ``module(q, k, v, positions=grid)``; q (B, H_q, N, D), k (B, H_k, N, D), v (B, H_k, N, D_v).

    Raises:
        ValueError: "unrotated" with an activation that can be negative.
    """

    def __init__(
        self,
        encoding: nn.Module | Callable[..., Any] | None = None,
        *,
        normalizer: NormalizerName = "unrotated",
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        check_normalizer(normalizer, "relu" if encoding is None else getattr(encoding, "act", "none"))
        check_eps(eps)
        self.encoding = encoding
        self.normalizer: NormalizerName = normalizer
        self.eps = eps

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Any = None,
        *,
        gate: Tensor | None = None,
        is_causal: bool = False,
        block: int | None = None,
        cu_seqlens: Tensor | None = None,
        state: State | tuple[Tensor] | None = None,
        return_state: bool = False,
        norm: Norm | None = None,
    ) -> Any:
        """o (B, H_q, N, D_v) in q's dtype, or (o, state); the arguments are those of :func:`lrpe_md.linear_attention`.

        Differentiable with respect to q, k, v, gate, state, the norm's weights and what the encoding learns.

        Raises:
            ValueError, TypeError: what does not fit, before anything is launched.
        """
        return attend_with(
            self.encoding, q, k, v, positions, normalizer=self.normalizer, gate=gate, is_causal=is_causal, block=block,
            cu_seqlens=cu_seqlens, state=state, return_state=return_state, eps=self.eps, norm=norm,
        )  # fmt: skip

    def extra_repr(self) -> str:
        encoding = "" if isinstance(self.encoding, nn.Module) else f"encoding={self.encoding!r}, "
        return f"{encoding}normalizer={self.normalizer!r}, eps={self.eps:g}"


def attend_with(
    encoding: nn.Module | Callable[..., Any] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Any = None,
    *,
    normalizer: NormalizerName = "unrotated",
    gate: Tensor | None = None,
    is_causal: bool = False,
    block: int | None = None,
    cu_seqlens: Tensor | None = None,
    state: State | tuple[Tensor] | None = None,
    return_state: bool = False,
    eps: float = 1e-6,
    norm: Norm | None = None,
) -> Any:
    """Compute a :class:`LinearAttention` with this encoding, for a backbone that holds the encoding itself."""
    call: Any = encoding
    positions = call.locate(positions) if getattr(encoding, "moved", ()) else positions
    if encoding is not None and not getattr(encoding, "describes", False):
        options = LinearOptions(
            None, getattr(encoding, "act", "none"), getattr(encoding, "dim", None), normalizer=normalizer,
            is_causal=is_causal, block=block, eps=eps, return_state=return_state,
        )  # fmt: skip
        return run_encoded(options, Given(q, k, v, gate, cu_seqlens, as_state(state)), call, positions, norm)

    def attend(own: Description, q: Tensor, k: Tensor) -> Any:
        own = own if norm is None else own._replace(norm=norm)
        return linear_attention(
            q, k, v, positions=positions, normalizer=normalizer, gate=gate, is_causal=is_causal, block=block,
            cu_seqlens=cu_seqlens, state=state, return_state=return_state, eps=eps, **own._asdict(),
        )  # fmt: skip

    if encoding is None:
        return attend(Description(None, act="relu"), q, k)
    return call(q, k, positions=positions, attend=attend)
