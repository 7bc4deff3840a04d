"""Linear attention as a module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor, nn

from ..checks import (
    check_at_least,
    check_one_of,
    explain_unknown_keyword,
    find_similar,
    is_finite_number,
    show_value,
    suggest,
)
from ..engine.core.call import Act
from ..engine.encode.validate import FSDP
from ..engine.linear.call import Description, Directions, NormalizerName, Rule, State
from ..engine.linear.dispatch import run_encoded
from ..engine.linear.validate import check_decay_range, check_eps, check_normalizer, check_rule
from ..functional_linear import linear_attention
from ..norm import Norm
from ..positions.sequences import text_positions
from .base import PreciseModule
from .encodings import Rotate1d

__all__ = ["HeadDecay", "LinearAttention", "Memory", "attend_with"]

DecayName = Literal["retnet", "lightning"]


class HeadDecay(PreciseModule):
    """Fixed or learned decay factors (H,) for :class:`LinearAttention`, one per key head.

    Args:
        num_heads: number of key heads, H.
        initial: "retnet" for 1 − 2^(−5 − h), "lightning" for exp(−8 h / H · (1 − depth)), or a tensor of decays (H,).
        depth: layer index divided by the number of layers. With "lightning", deeper layers forget less.
        learnable: if True, learn the logit log(g / (1 − g)) of each decay g, so g stays in (0, 1), and limit the named
            initial decays to 1 − 2⁻¹².

    The decay stays in float32 after ``.to(bfloat16)``, because bfloat16 would round most decays to 1. Fixed decays are
    not saved in the state_dict. FSDP2's mixed precision would cast a learned logit, so call ``fully_shard`` on this
    module first.

    Sources: RetNet (arXiv 2307.08621), Lightning attention of TransNormerLLM (arXiv 2307.14995).
    """

    decay: Tensor
    logit: Tensor

    def __init__(
        self,
        num_heads: int,
        initial: DecayName | Tensor = "retnet",
        *,
        depth: float = 0.0,
        learnable: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_one_of("learnable", learnable, (False, True))
        self.num_heads, self.learnable, self.depth = num_heads, learnable, depth
        self.name = "own" if isinstance(initial, Tensor) else initial
        self.initial = _initial_decay(num_heads, initial, depth)
        if learnable:
            if isinstance(initial, Tensor) and (self.initial == 1).any():
                raise ValueError(
                    "initial: expected decays below 1 with learnable=True, got 1, which a sigmoid never reaches"
                )
            self.register_parameter("logit", nn.Parameter(self._initial("logit", device)))
        else:
            self.register_buffer("decay", self._initial("decay", device), persistent=False)
        self._mark()

    def _initial(self, name: str, device: torch.device | str | None = None) -> Tensor:
        values = self.initial if name == "decay" else self.initial.clamp_max(1 - 2.0**-12).logit()
        return values.to(torch.get_default_device() if device is None else device, torch.float32)

    def forward(self) -> Tensor:
        """Return the decay (H,).

        Raises:
            TypeError: if a library cast the decay or its logit to 16 bits.
        """
        own = self.logit if self.learnable else self.decay
        if own.dtype not in (torch.float32, torch.float64):
            name = "logit" if self.learnable else "decay"
            raise TypeError(f"{name}: expected float32 (16 bits round most decays to 1), got {own.dtype}{FSDP}")
        return own.sigmoid() if self.learnable else own

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, initial={self.name!r}, learnable={self.learnable}"


def _initial_decay(num_heads: int, initial: DecayName | Tensor, depth: float) -> Tensor:
    check_at_least(1, num_heads=num_heads)
    if isinstance(initial, Tensor):
        values = initial.detach().to("cpu", torch.float64)
        if values.shape != (num_heads,):
            raise ValueError(f"initial: expected shape ({num_heads},), one decay per head, got {tuple(values.shape)}")
        check_decay_range(values)
        return values
    if initial not in get_args(DecayName):
        raise ValueError(
            f"initial: expected one of {get_args(DecayName)} or a tensor of shape (H,), got {show_value(initial)}"
        )
    if not is_finite_number(depth) or not 0 <= depth <= 1:
        raise ValueError(f"depth: expected a layer's index divided by the number of layers, got {show_value(depth)}")
    head = torch.arange(num_heads, dtype=torch.float64, device="cpu")
    if initial == "retnet":
        return 1 - 2.0 ** (-5 - head)
    return (-8 * head / num_heads * (1 - depth)).exp()


@dataclass(frozen=True)
class Memory:
    """Options for the state of a model's linear attention layers: how each block updates the state, and its decay.

    A block is a video frame, or a token in a language model.

    Args:
        rule: "add" adds each block to the state. "delta" first removes the values that the block's keys retrieve; see
            :func:`lrpe_md.linear_attention`. "delta" requires frames and normalised keys (``qk_norm``). With "delta",
            the layer weights each key by 1 / (head_dim · tokens in a frame), so the squared norms of a frame's keys sum
            to about 1.
        decay: initial decays of :class:`HeadDecay`: "retnet", or "lightning", which depends on the layer. None disables
            decay.
        learnable: whether each layer learns its decays.
        directions: with "forward", a frame attends to itself and to earlier frames, as in a causal model. With "both",
            a frame also attends to later frames through a second state, as in a bidirectional video model.

    Raises:
        ValueError: for an unknown value, or learnable=True without a decay.
    """

    rule: Rule = "add"
    decay: DecayName | None = None
    learnable: bool = False
    directions: Directions = "forward"

    def __post_init__(self) -> None:
        check_rule(self.rule, self.directions)
        check_one_of("decay", self.decay, (*get_args(DecayName), None))
        check_one_of("learnable", self.learnable, (False, True))
        if self.learnable and self.decay is None:
            raise ValueError(
                "learnable: expected False without a decay, got True; choose decay='retnet' or 'lightning'"
            )

    def build_decay(
        self, num_heads: int, layer: int, depth: int, device: torch.device | str | None = None
    ) -> HeadDecay | None:
        """Build the decay module for layer ``layer`` of ``depth``, or return None if there is no decay."""
        if self.decay is None:
            return None
        return HeadDecay(num_heads, self.decay, depth=layer / depth, learnable=self.learnable, device=device)


class LinearAttention(nn.Module):
    """Linear attention (:func:`lrpe_md.linear_attention`) with the map, activation and frequencies of an encoding.

    Args:
        encoding: a :class:`CosineMd`, :class:`RotateMd`, :class:`Rotate1d` or :class:`PresetMd`. The encoding becomes a
            submodule, so learned frequencies are also parameters of this module. None means no positions, with
            act="relu". Any other module or function, or a Rotate1d with a ``scale_base``, is called as ``encoding(q, k,
            positions=positions)``, after the norm if there is one. Such an encoding must return q̂ and k̂, which are
            therefore written to memory. With normalizer "unrotated", the ``act`` and ``dim`` attributes of the encoding
            (default: none) define q̄ and k̄, and everything except the encoding runs in plain PyTorch.
        normalizer, eps, rule, directions: see :func:`lrpe_md.linear_attention`.
        decay: a :class:`HeadDecay`, or another module that returns a decay. With None, there is no decay unless you
            pass one to forward.

    Call with ``module(q, k, v, positions=grid)``, where q is (B, H_q, N, D), k is (B, H_k, N, D) and v is (B, H_k, N,
    D_v). With a :class:`Rotate1d`, the default positions are 0, 1, ...

    Raises:
        ValueError: for normalizer="unrotated" with an activation that can be negative.
        TypeError: for an encoding or decay of another type, or an unknown argument.
    """

    def __init__(
        self,
        encoding: nn.Module | Callable[..., Any] | None = None,
        *,
        normalizer: NormalizerName = "unrotated",
        eps: float = 1e-6,
        decay: nn.Module | None = None,
        rule: Rule = "add",
        directions: Directions = "forward",
        **unknown: NoReturn,
    ) -> None:
        super().__init__()
        if unknown:
            raise TypeError(_explain_misplaced_keyword(next(iter(unknown)), "build", "call"))
        check_rule(rule, directions)
        if encoding is not None and (not callable(encoding) or isinstance(encoding, type)):
            raise TypeError(
                f"encoding: expected a module, a function or None, got {show_value(encoding)}; pass a module such as "
                "RotateMd(head_dim, num_axes)"
            )
        if decay is not None and not isinstance(decay, nn.Module):
            raise TypeError(
                f"decay: expected a HeadDecay or another module, got {type(decay).__name__}; pass a tensor to forward"
            )
        check_normalizer(normalizer, "relu" if encoding is None else getattr(encoding, "act", "none"))
        check_eps(eps)
        self.encoding = encoding
        self.normalizer: NormalizerName = normalizer
        self.eps = eps
        self.decay = decay
        self.rule: Rule = rule
        self.directions: Directions = directions

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled module. Pickles from version 0.2 have no decay."""
        super().__setstate__({"rule": "add", "directions": "forward", **state})
        self._modules.setdefault("decay", None)

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
        decay: Tensor | None = None,
        norm: Norm | None = None,
        **unknown: NoReturn,
    ) -> Any:
        """Return o (B, H_q, N, D_v) in q's dtype, or (o, state) with ``return_state``.

        See :func:`lrpe_md.linear_attention` for the arguments. If you pass a decay, it replaces the module's own decay.
        The result is differentiable with respect to q, k, v, gate, state, decay, the norm's weights, and the learned
        parameters of the encoding and the decay.

        Raises:
            ValueError, TypeError: for an invalid argument, before a kernel is launched.
        """
        if unknown:
            raise TypeError(_explain_misplaced_keyword(next(iter(unknown)), "call", "build"))
        if decay is None and self.decay is not None:
            decay = self.decay()
        return attend_with(
            self.encoding, q, k, v, positions, normalizer=self.normalizer, gate=gate, is_causal=is_causal, block=block,
            cu_seqlens=cu_seqlens, state=state, return_state=return_state, decay=decay, rule=self.rule,
            directions=self.directions, eps=self.eps, norm=norm,
        )  # fmt: skip

    def extra_repr(self) -> str:
        encoding = "" if isinstance(self.encoding, nn.Module) else f"encoding={self.encoding!r}, "
        memory = "" if self.rule == "add" else f", rule={self.rule!r}"
        memory += "" if self.directions == "forward" else f", directions={self.directions!r}"
        return f"{encoding}normalizer={self.normalizer!r}, eps={self.eps:g}{memory}"


def _explain_misplaced_keyword(name: str, when: str, otherwise: str) -> str:
    """Return an error message for a keyword argument that :class:`LinearAttention` doesn't accept at this time."""
    options = {
        time: [each for each in inspect.signature(method).parameters if each not in ("self", "q", "k", "v", "unknown")]
        for time, method in {"build": LinearAttention.__init__, "call": LinearAttention.forward}.items()
    }
    elsewhere, advice = find_similar(name, options[otherwise]), suggest(name, options[when])
    if not advice and elsewhere is not None:
        advice = f"; pass {elsewhere} when you {otherwise} it"
    return explain_unknown_keyword("LinearAttention", name, when, advice)


def attend_with(
    encoding: nn.Module | Callable[..., Any] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Any = None,
    *,
    gate: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: State | tuple[Tensor] | None = None,
    decay: Tensor | None = None,
    norm: Norm | None = None,
    act: Act | None = None,
    **options: Any,
) -> Any:
    """Compute :class:`LinearAttention` with an encoding that belongs to another module.

    act: activation to use instead of the encoding's own. This requires an encoding with a ``describe()`` method.
    options: other arguments of :func:`lrpe_md.linear_attention`.
    """
    call: Any = encoding
    if positions is None and isinstance(encoding, Rotate1d) and isinstance(q, Tensor) and q.ndim == 4:
        if state is not None:
            raise ValueError(
                "positions: expected the positions of the new tokens when a state is passed, got None; after n tokens, "
                "pass Grid((N,)).offset(n)"
            )
        positions = text_positions(q, 0, cu_seqlens, encoding.dim)
    positions = call.locate(positions) if getattr(encoding, "moved", ()) else positions
    if encoding is not None and not getattr(encoding, "describes", False):
        return run_encoded(
            call, q, k, v, positions, gate=gate, cu_seqlens=cu_seqlens, state=state, decay=decay, norm=norm, **options
        )

    def attend(own: Description, q: Tensor, k: Tensor) -> Any:
        own = own if norm is None else own._replace(norm=norm)
        own = own if act is None else own._replace(act=act, dim=None)
        return linear_attention(
            q, k, v, positions=positions, gate=gate, cu_seqlens=cu_seqlens, state=state, decay=decay, **options,
            **own._asdict(),
        )  # fmt: skip

    if encoding is None:
        return attend(Description(None, act="relu"), q, k)
    return call(q, k, positions=positions, attend=attend)
