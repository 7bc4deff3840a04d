"""An encoding for a model that has none, where q and k enter ``scaled_dot_product_attention``.

    from lrpe_md import Grid
    from lrpe_md.integrations import adapt_attention

    adapt_attention(dit, "rotate", positions=lambda x, t, y: Grid((x.shape[2] // 2, x.shape[3] // 2)))

Code and classes stay as they are. The model and its attentions get a ``forward`` of their own: that of the model asks
for the positions and remembers them, that of an attention runs the original under a ``TorchFunctionMode`` that encodes
q and k.

A checkpoint runs a part of the model again in the backward, when the model's forward is long over. So the positions
travel with the tensors that autograd saves: each of them is packed with the positions of its forward, and what unpacks
one, as every checkpoint does with its inputs, finds them again.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from types import CodeType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

from ..engine.boundary import transforming
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from .attention import check_causal, sdpa_backends
from .encoding import Encoding, EncodingStack, build_encoding

__all__ = ["adapt_attention", "restore_attention", "set_positions"]

Model = TypeVar("Model", bound=nn.Module)
Where: TypeAlias = Grid | Coordinates | Tensor

_SDPA = F.scaled_dot_product_attention
NAMES = ("attn", "attention", "attn1", "self_attn", "self_attention")  # of self-attentions in other people's models
_HEADS = ("num_heads", "n_head", "n_heads", "heads", "num_attention_heads")
_HEAD_DIM = ("head_dim", "dim_head", "attention_head_size")
_WIDTH = ("embed_dim", "n_embd", "inner_dim", "hidden_size", "dim")


# --- the forwards of one model ---------------------------------------------------------------------------------------


class _Forward:
    """The forward of one instance, instead of its class'."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.original: Any = vars(module).get("forward")  # None: that of the class, which may be patched
        self.of_class: Any = type(module).forward

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "of_class": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, of_class=type(state["module"]).forward)

    @torch.compiler.assume_constant_result
    def look_up(self) -> bool:
        """Find the class' forward, which Dynamo does not where the class is one that it allows in graphs."""
        self.of_class = type(self.module).forward
        return True

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original."""
        self.look_up()
        if self.original is None:
            return self.of_class(self.module, *args, **kwargs)
        return self.original(*args, **kwargs)

    def remove(self) -> None:
        if self.original is None:
            del self.module.forward
        else:
            self.module.forward = self.original


class _Positions(NamedTuple):
    """Positions, and the backward in which they were set; -1 outside of one."""

    where: Where | None
    task: int


class _Local(threading.local):
    """``running``: of the forward that this thread runs. ``current``: the same, or those that were unpacked last."""

    def __init__(self) -> None:  # in each thread; Dynamo's guards would overlook attributes of the class
        self.running: Any = None  # _Positions, or None
        self.current: Any = None
        self.recalled: Any = None  # what ``current`` was made of

    def recall(self, positions: _Positions) -> None:
        """Make positions that were unpacked the current ones, until the backward ends."""
        task = _current_task()
        if task == -1 or self.recalled is positions:
            return
        if self.current is None or self.current.task != task:
            torch.autograd.Variable._execution_engine.queue_callback(partial(self.forget, task))
        self.current, self.recalled = positions._replace(task=task), positions

    def forget(self, task: int) -> None:
        if self.current is not None and self.current.task == task:
            self.current, self.recalled = self.running, None


class _Adaptation(_Forward):
    """One call of :func:`adapt_attention`, and the forward of its model, which knows the positions while it runs.

    Args:
        model: it has the encoding as its attribute ``name``.
        positions: what they are, or a function of the arguments of the model's forward, or None.
    """

    def __init__(self, model: nn.Module, name: str, positions: Any) -> None:
        super().__init__(model)
        self.name, self.positions = name, positions
        self.is_fixed = isinstance(positions, (Grid, Coordinates, Tensor))
        self.attentions: list[_Attention] = []
        self.num_calls: Counter[str | None] = Counter()  # by layer
        self.is_used = False
        self.local = _Local()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "local": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.local = _Local()

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original or type(self.module).forward.__get__(self.module))

    @property
    def __code__(self) -> CodeType:
        """Where this is written; ``torch.export`` asks for it."""
        return self.run.__code__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # Dynamo allows modes inside a checkpoint once there was one outside
            with BaseTorchFunctionMode():
                pass
        if self.is_fixed:
            output = self.run(*args, **kwargs)
        else:
            local = self.local
            before = local.running, local.current
            where = None if self.positions is None else _check_positions(self.positions(*args, **kwargs))
            local.running = local.current = _Positions(where, _current_task())
            try:
                with _travel_with_saved_tensors(local):
                    output = self.run(*args, **kwargs)
            finally:
                local.running, local.current = before
        if not self.is_used:
            raise RuntimeError(
                f"modules: expected attentions that the forward of {type(self.module).__name__} calls, got "
                f"{self.attentions[0].path or 'the model'} and {len(self.attentions) - 1} more, of which it called "
                "none. Name the modules whose own forward calls scaled_dot_product_attention"
            )
        return output

    # A compiler runs these two when it traces, which is when SDPA is called or not.

    @torch.compiler.assume_constant_result
    def count_calls(self, layer: str | None) -> int:
        return self.num_calls[layer]

    @torch.compiler.assume_constant_result
    def note_call(self, layer: str | None) -> bool:
        self.num_calls[layer] += 1
        self.is_used = True
        return True

    def locate(self, path: str) -> Where:
        """Return where the tokens are of an attention that runs now, in a forward or again in its backward."""
        if self.is_fixed:
            return self.positions
        if torch.compiler.is_compiling():
            found = self.local.current
        else:
            task, known = _current_task(), (self.local.current, self.local.running)
            found = next((each for each in known if each is not None and each.task == task), None)
        if found is None or found.where is None:
            raise RuntimeError(
                f"positions: expected {path} to run in the forward of the adapted {type(self.module).__name__}, got no "
                "positions. Call the model itself, return positions from the function, or call set_positions() before "
                "the first attention. If this is a checkpoint's second run: one inside another needs "
                "use_reentrant=False, and one that a compiled model breaks its graph at needs blocks that are compiled "
                "one by one"
            )
        return found.where


def _check_positions(positions: Any) -> Any:
    if positions is None or isinstance(positions, (Grid, Coordinates, Tensor)):
        return positions
    raise TypeError(
        "positions: expected a Grid, Coordinates, a tensor (N, K) or (B, N, K), or a function that returns one, got "
        f"{type(positions).__name__}"
    )


def _current_task() -> int:
    """Return the number of the backward that runs, or -1."""
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


# --- positions that travel with saved tensors ------------------------------------------------------------------------


def _current_hooks() -> Any:
    """Return the hooks on saved tensors, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]


def _travel_with_saved_tensors(local: _Local) -> AbstractContextManager[Any]:
    """Pack the tensors that autograd saves together with the positions of the forward that runs.

    Hooks that the caller has set go on working. Where none can be set, nothing is checkpointed with them either.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or transforming():
        return nullcontext()
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # pyright: ignore[reportAttributeAccessIssue]
        return nullcontext()
    pack_tensor, unpack_tensor = _current_hooks() or (_pack, _unpack)

    def pack(t: Tensor) -> Any:
        return local.running, pack_tensor(t)

    def unpack(packed: Any) -> Tensor:
        local.recall(packed[0])
        return unpack_tensor(packed[1])

    return saved_tensors_hooks(pack, unpack)


def _pack(t: Tensor) -> Any:
    return t._version, t


def _unpack(packed: Any) -> Tensor:
    version, t = packed
    if t._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{t.type()} {list(t.shape)}] is at version {t._version}; expected version {version} instead"
        )
    return t


# --- an attention ----------------------------------------------------------------------------------------------------


class _Attention(_Forward):
    """The forward of an attention: q and k are encoded where they enter SDPA.

    Args:
        path: of the module in the model.
        layer: its number where each attention has an encoding of its own; else None. A string, whose value compilers
            always guard.
    """

    def __init__(self, module: nn.Module, path: str, adaptation: _Adaptation, layer: str | None) -> None:
        super().__init__(module)
        self.path, self.adaptation, self.layer = path, adaptation, layer

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward. A method: Dynamo tells objects apart by their id, and would compile each block by itself."""
        before = self.adaptation.count_calls(self.layer)
        with _Encode(self):
            output = self.run(*args, **kwargs)
        if self.adaptation.count_calls(self.layer) == before:
            raise RuntimeError(
                f"{self.path or 'forward'}: expected a call of F.scaled_dot_product_attention, where q and k are "
                "encoded, got none. With timm set `fused_attn = True` on the module. Otherwise replace the attention "
                "that is written out by\n"
                "    x = F.scaled_dot_product_attention(q, k, v)\n"
                "or encode before it, with an encoding that the module owns:\n"
                "    q, k = self.encoding(q, k, positions=positions)  # (B, H, N, D)"
            )
        return output

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Encode q and k, and call ``scaled_dot_product_attention``, whose arguments these are."""
        own, layer = self.adaptation, self.layer
        own.note_call(layer)
        # A compiler that reads the path would compile each block by itself.
        path = "an attention" if torch.compiler.is_compiling() else self.path or "the model"
        if query.ndim != 4 or key.ndim != 4:
            raise ValueError(
                f"{path}: expected q and k (B, H, N, D) in scaled_dot_product_attention, got {tuple(query.shape)} and "
                f"{tuple(key.shape)}. Leave this module out with modules=, or reshape q and k"
            )
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"{path}: expected self-attention, where q and k have the same tokens, got {query.shape[2]} and "
                f"{key.shape[2]} tokens. Name the self-attentions with modules=; key caches are not supported"
            )
        encoding = getattr(own.module, own.name)
        encoding = encoding if layer is None else encoding[int(layer)]
        if is_causal:
            check_causal(encoding)
        q, k = encoding(query, key, positions=own.locate(path))
        backends = None
        if q.shape[-1] != query.shape[-1]:
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            backends = sdpa_backends(q, value)
        with nullcontext() if backends is None else sdpa_kernel(backends, set_priority=True):
            return F.scaled_dot_product_attention(
                q, k, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )


class _Encode(TorchFunctionMode):
    """Encodes q and k in the calls of SDPA under it, and refuses what the backward would run again without it."""

    def __init__(self, attention: _Attention) -> None:
        super().__init__()
        self.attention = attention
        is_checked = not torch.compiler.is_compiling() and torch.is_grad_enabled()
        self.before = (_current_hooks(),) if is_checked else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _SDPA:
            return func(*args, **kwargs) if kwargs else func(*args)
        if self.before is not None:
            hooks = _current_hooks()
            is_checkpoint = hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
            if not torch.is_grad_enabled() or (is_checkpoint and hooks != self.before[0]):
                raise RuntimeError(
                    f"{self.attention.path}: expected no checkpoint, no_grad or autograd.Function between the module's "
                    "forward and scaled_dot_product_attention, since the backward could run that part without the "
                    "encoding. Checkpoint the whole module"
                )
        return self.attention.attend(*args, **(kwargs or {}))


# --- public ----------------------------------------------------------------------------------------------------------


def adapt_attention(
    model: Model,
    encoding: Encoding,
    positions: Where | Callable[..., Where | None] | None,
    *,
    modules: str | Sequence[str] | None = None,
    encoding_kwargs: dict[str, Any] | None = None,
    num_axes: int | None = None,
    head_dim: int | None = None,
    num_heads: int | None = None,
    name: str = "encoding",
) -> Model:
    """Put an encoding into a model that has none, without editing its forwards; returns the model.

    In place: q and k are encoded where they enter ``torch.nn.functional.scaled_dot_product_attention`` inside the
    self-attentions. Only this model changes, and it works under checkpointing, autocast, ``torch.compile``, DDP and
    FSDP2, and in copies and pickles of the model. (A block that is compiled by itself and has a checkpoint inside
    breaks its graph there.) Weights, their names, hooks and classes stay as they are. Learned frequencies are
    parameters at ``model.encoding``, so call it before you build the optimizer. Positions that the model adds to its
    tokens stay, too: remove them yourself if you want to.

    Args:
        model: DiT, SiT, U-ViT, MAE, nanoGPT, .. For a plain ViT of timm, :func:`lrpe_md.adapt` does more.
        encoding: "rotate", "cosine", "mixed", the name of a preset, a ``Scheme``, a factory, or a module that is called
            as ``encoding(q, k, positions=positions)`` with q, k (B, H, N, D): see :func:`.encoding.build_encoding`. It
            is moved to the model's device.
        positions: where the tokens are: a :class:`Grid` or :class:`Coordinates`, the same for all inputs, or a function
            of the arguments of the model's forward that returns it. It counts all tokens of the attention, so
            ``Grid((H, W), prefix=1)`` if there is a class token. With a preset return what its ``positions()`` gives.
            None if the model's own code calls :func:`set_positions`.
        modules: patterns of the self-attentions' names, such as "blocks.*.attn". The default takes modules named attn,
            attn1, attention, self_attn or self_attention; of nested ones the outermost.
        encoding_kwargs: for the encoding, see :func:`.encoding.build_encoding`; ``sharing="layer"`` gives each layer
            its own.
        num_axes: of the positions, for an encoding that is made here; default: that of fixed positions, else 2.
        head_dim, num_heads: of the attentions; default: read from them.
        name: the attribute of the model that holds the encoding. Call ``adapt_attention`` twice with two names if two
            groups of modules differ, as the encoder and the decoder of an MAE do.

    The cosine map makes q and k twice as wide; attention keeps the scale of their original head_dim. An attention whose
    q and k differ in length is an error: leave cross-attention out, and key caches off.

    Raises:
        TypeError, ValueError: an argument that does not fit, no such modules, or modules that are adapted already; the
            model is as it was.
        RuntimeError: in the forward, if an attention does not call ``scaled_dot_product_attention``.
    """
    if not isinstance(model, nn.Module) or hasattr(model, "_orig_mod"):
        kind = type(model).__name__
        raise TypeError(f"model: expected an nn.Module that is not compiled, got {kind}; adapt before torch.compile")
    if hasattr(model, name):
        raise ValueError(f"name: expected an attribute that the model does not have, got {name!r}; choose another")
    if not callable(positions):
        _check_positions(positions)
    found = _find_attentions(model, modules)
    built = _build(encoding, dict(encoding_kwargs or {}), found, positions, (num_axes, head_dim, num_heads))
    model.add_module(name, built.train(model.training))
    adaptation = _Adaptation(model, name, positions)
    by_layer = EncodingStack(built).by_layer
    for i, (path, module) in enumerate(found.items()):
        adaptation.attentions.append(_Attention(module, path, adaptation, str(i) if by_layer else None))
        module.forward = adaptation.attentions[-1].call
    model.forward = adaptation
    return model


def restore_attention(model: Model) -> Model:
    """Undo :func:`adapt_attention`, in place; a model that is not adapted stays as it is.

    Raises:
        ValueError: a forward was replaced since then, by an offloading hook for one; the model is as it was.
    """
    found = {own.adaptation for own in map(_attention_of, model.modules()) if own is not None}
    adaptations = list(_adaptations_of(model))
    for own in found:
        replaced = [each.path for each in own.attentions if _attention_of(each.module) is not each]
        if replaced or own not in adaptations:
            raise ValueError(
                f"model: expected the forwards that adapt_attention set, got another one in "
                f"{(replaced or ['the model'])[0]}. Remove what replaced it first"
            )
    for own in adaptations:
        own.remove()
        delattr(model, own.name)
        for attention in own.attentions:
            attention.remove()
    return model


def set_positions(model: nn.Module, positions: Where, name: str = "encoding") -> None:
    """Say where the tokens are, from inside the forward of an adapted model.

    For models that choose their tokens themselves: an MAE calls it where it draws the patches that it keeps. It holds
    for the attentions that follow, until the forward ends. Call it outside of what is checkpointed.

    Args:
        model: what :func:`adapt_attention` was given.
        positions: of all tokens that the following attentions see.
        name: that ``adapt_attention`` was given.

    Raises:
        ValueError: no such adaptation, one whose positions are fixed, or no forward that runs.
    """
    _check_positions(positions)
    local = next((own.local for own in _adaptations_of(model) if own.name == name and not own.is_fixed), None)
    if local is None or local.running is None:
        raise ValueError(
            f"model: expected a running forward of a model adapted with name={name!r} and without fixed positions, "
            f"got {type(model).__name__}"
        )
    local.running = local.current = local.running._replace(where=positions)


def _attention_of(module: nn.Module) -> _Attention | None:
    owner = getattr(vars(module).get("forward"), "__self__", None)
    return owner if isinstance(owner, _Attention) else None


def _adaptations_of(model: nn.Module) -> Iterator[_Adaptation]:
    """Yield the adaptations of a model, the last one first."""
    forward = vars(model).get("forward")
    while isinstance(forward, _Adaptation):
        yield forward
        forward = forward.original


# --- which modules, and what they are made of ------------------------------------------------------------------------


def _find_attentions(model: nn.Module, modules: str | Sequence[str] | None) -> dict[str, nn.Module]:
    patterns = (modules,) if isinstance(modules, str) else modules
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        is_named = name in NAMES if patterns is None else any(fnmatchcase(path, each) for each in patterns)
        is_inside = any(path.startswith(f"{outer}.") or outer == "" for outer in found)
        if is_named and not is_inside and not isinstance(module, (nn.Identity, nn.ModuleList, nn.ModuleDict)):
            found[path] = module
    if not found:
        names = sorted({path for path, _ in model.named_modules() if "att" in path.split(".")[-1].lower()})
        raise ValueError(
            f"modules: expected patterns of names such as {', '.join(names[:4]) or 'blocks.*.attn'}, got "
            f"{'modules named ' + ', '.join(NAMES) if modules is None else modules!r}, which matches none"
        )
    for path, module in found.items():
        if _attention_of(module) is not None:
            raise ValueError(
                f"modules: expected modules that are not adapted, got {path}; call restore_attention first"
            )
        if isinstance(module, nn.MultiheadAttention):
            raise TypeError(
                f"modules: expected attentions that call scaled_dot_product_attention, got {path}, an "
                "nn.MultiheadAttention, which may run as one fused operator. Leave it out, or write the attention with "
                "F.scaled_dot_product_attention"
            )
    return found


def _build(
    encoding: Any, kwargs: dict[str, Any], found: dict[str, nn.Module], positions: Any, sizes: tuple[int | None, ...]
) -> nn.Module:
    """Return a module for all attentions, or one each. sizes: num_axes, head_dim and num_heads, or None."""
    num_axes, head_dim, num_heads = sizes
    if num_axes is None:
        num_axes = positions.shape[-1] if isinstance(positions, Tensor) else getattr(positions, "num_axes", 2)
    if not isinstance(encoding, nn.Module) and (head_dim is None or num_heads is None):
        read = {_read_heads(path, module) for path, module in found.items()}
        if len(read) > 1:
            raise ValueError(
                f"modules: expected attentions with one head_dim and num_heads, got {sorted(read)}. Adapt each group "
                "by itself, with modules= and name="
            )
        own = read.pop()
        head_dim, num_heads = head_dim or own[0], num_heads or own[1]
    built = build_encoding(encoding, kwargs, head_dim or 0, num_heads or 0, len(found), num_axes)
    if built is None:
        raise ValueError(f"encoding: expected one that encodes, got {encoding!r}")
    if isinstance(built, nn.ModuleList) and len(built) != len(found):
        raise ValueError(f"encoding: expected one module for each of {len(found)} attentions, got {len(built)}")
    device = next((t.device for module in found.values() for t in module.parameters()), None)
    return built if device is None else built.to(device)


def _read_heads(path: str, module: nn.Module) -> tuple[int, int]:
    """Return head_dim and num_heads of somebody else's attention."""
    for source in (module, getattr(module, "config", None)):
        values = [[getattr(source, name, None) for name in names] for names in (_HEADS, _HEAD_DIM, _WIDTH)]
        heads, size, width = (next((v for v in each if isinstance(v, int) and v > 0), 0) for each in values)
        if heads and (size or width):
            return size or width // heads, heads
    raise ValueError(f"head_dim, num_heads: expected them as arguments, since {path} does not say them, got None")
