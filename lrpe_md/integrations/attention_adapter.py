"""Add an encoding to a model without one, at its calls to ``scaled_dot_product_attention``.

    from lrpe_md import Grid
    from lrpe_md.integrations import adapt_attention

    adapt_attention(dit, "rotate", positions=lambda x, t, y: Grid((x.shape[2] // 2, x.shape[3] // 2)))

The replacement for the model's ``forward`` computes the positions. The replacement for an attention module's
``forward`` runs the original under a ``TorchFunctionMode`` that encodes q and k. A compiler traces a copy of the
original instead, because compilers reject such a mode inside a checkpoint.

A checkpoint reruns parts of the model after its forward pass has ended. The positions therefore travel with the tensors
that autograd saves. Every checkpoint unpacks its inputs, which restores the positions.
"""

from __future__ import annotations

import inspect
import re
import threading
import weakref
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
from torch.overrides import TorchFunctionMode

from ..checks import describe_positions
from ..engine.inductor.private import is_transforming
from ..modules.base import FrequencyModule
from ..positions.coordinates import Coordinates
from ..positions.grid import Grid
from .attention import check_causal, softmax_attention
from .copies import SDPA, copy_forward
from .encoding import Encoding, EncodingStack, build_encoding, explain_misplaced_options
from .rotary import find_rotary

__all__ = ["adapt_attention", "find_adapted_forward", "restore_attention", "set_positions"]

Model = TypeVar("Model", bound=nn.Module)
Where: TypeAlias = Grid | Coordinates | Tensor

NAMES = ("attn", "attention", "attn1", "self_attn", "self_attention")  # common names of self-attention modules
_LISTS = (nn.ModuleList, nn.ModuleDict)
_HEADS = ("num_heads", "n_head", "n_heads", "heads", "num_attention_heads")
_HEAD_DIM = ("head_dim", "dim_head", "attention_head_size")
_WIDTH = ("embed_dim", "n_embd", "inner_dim", "hidden_size", "dim")


# --- state shared by the forward methods of a model ------------------------------------------------------------------


class _Entry(NamedTuple):
    """Positions, and the id of the backward pass that set them, or -1 in a forward pass."""

    positions: Where | None
    task: int


class _Local(threading.local):
    """Positions in this thread: those of the forward pass (``running``), and the current ones (``current``)."""

    def __init__(self) -> None:  # set per thread, because Dynamo's guards would miss class attributes
        self.running: Any = None  # an _Entry, or None
        self.current: Any = None
        self.recalled: Any = None  # the entry from which ``current`` was set

    def recall(self, entry: _Entry) -> None:
        """Make unpacked positions the current ones until the backward pass ends."""
        task = -1 if self.recalled is entry else _current_task()
        if task == -1:
            return
        if self.current is None or self.current.task != task:
            torch.autograd.Variable._execution_engine.queue_callback(partial(self.forget, task))
        self.current, self.recalled = _Entry(entry.positions, task), entry

    def forget(self, task: int) -> None:
        if self.current is not None and self.current.task == task:
            self.current, self.recalled = self.running, None

    def __reduce__(self) -> Any:
        return _Local, ()  # a copy of the model does not start in a forward pass


class _Adaptation:
    """A single call to :func:`adapt_attention`, with its arguments.

    :meth:`attend` replaces ``scaled_dot_product_attention``. ``layer`` is the index of the attention module, or None if
    all attention modules share one encoding.
    """

    def __init__(self, model: nn.Module, name: str, positions: Any) -> None:
        self.model, self.name, self.positions = model, name, positions
        self.is_fixed = isinstance(positions, (Grid, Coordinates, Tensor))
        self.attentions: list[_Attention] = []
        self.local = _Local()
        self.num_calls = 0
        self.copies: dict[Any, Any] = {}  # maps a class's forward and a layer to a copy, or to None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "copies": {}}  # the copies refer to this object

    @torch.compiler.assume_constant_result
    def update_copies(self) -> bool:
        """Update the copies of all forward methods at once, so that compiled blocks share code.

        The original methods may have been patched.
        """
        for each in self.attentions:
            each.look_up()
            each.copy = self.find_copy(each.module, each.of_class, each.layer) if each.original is None else None
        return True

    def locate(self, path: str) -> Where:
        """Return the positions for an attention module in a forward pass, or as recomputed in a backward pass."""
        if self.is_fixed:
            return self.positions
        if torch.compiler.is_compiling():
            found = self.local.current
        else:
            task, entries = _current_task(), (self.local.current, self.local.running)
            found = next((entry for entry in entries if entry is not None and entry.task == task), None)
        if found is None or found.positions is None:
            raise RuntimeError(
                f"positions: expected positions for {path} from the forward pass of the adapted "
                f"{type(self.model).__name__}, got none. Call the model itself, return positions from the "
                "function, or call set_positions() before the first attention layer. With activation "
                "checkpointing, pass use_reentrant=False to nested checkpoints, and if a compiled model has a graph "
                "break at a checkpoint, compile its blocks one by one"
            )
        return found.positions

    # A compiler only runs the next two methods while it traces, which is when the forward method may call SDPA.

    @torch.compiler.assume_constant_result
    def count_calls(self) -> int:
        return self.num_calls

    @torch.compiler.assume_constant_result
    def _note_call(self) -> bool:
        self.num_calls += 1
        return True

    def attend(
        self, layer: int | None, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, path: str = "an attention", **options: Any,
    ) -> Tensor:  # fmt: skip
        """Encode q and k, and call ``scaled_dot_product_attention`` with the given arguments."""
        self._note_call()
        options |= {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal}
        _check_self_attention(path, query, key)
        encoding = getattr(self.model, self.name)
        encoding = encoding if layer is None else encoding[layer]
        if is_causal:
            check_causal(encoding)
        q, k = encoding(query, key, positions=self.locate(path))
        if q.shape[-1] == query.shape[-1]:
            return F.scaled_dot_product_attention(q, k, value, **options)
        if options.get("scale") is None:
            options["scale"] = query.shape[-1] ** -0.5
        return softmax_attention(q, k, value, **options)

    def find_copy(self, module: nn.Module, forward: Any, layer: int | None) -> Any:
        """Return a copy of a module's forward method that calls :meth:`attend`, or None if there is none."""
        if (forward, layer) not in self.copies:
            ref = weakref.ref(self)  # the copy must not keep the model alive

            def attend(*args: Any, **kwargs: Any) -> Tensor:
                adaptation: Any = ref()
                return adaptation.attend(layer, *args, **kwargs)

            self.copies[forward, layer] = copy_forward(module, attend)
        return self.copies[forward, layer]


def _check_positions(positions: Any) -> Any:
    if positions is None or isinstance(positions, (Grid, Coordinates, Tensor)):
        return positions
    raise TypeError(
        "positions: expected a Grid, Coordinates, a tensor of shape (N, K) or (B, N, K), or a function that returns "
        f"positions, got {describe_positions(positions)}"
    )


def _call_positions(where: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function that returns the positions. Explain the error if it does not accept the model's arguments."""
    if torch.compiler.is_compiling():
        return where(*args, **kwargs)
    try:
        return where(*args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:  # raised by its body
            raise
        raise TypeError(
            f"positions: expected a function that takes the arguments of the model's forward, got {error}"
        ) from error


def _current_task() -> int:
    return -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


class _Forward:
    """Replacement for the forward method of one module instance."""

    def __init__(self, module: nn.Module, adaptation: _Adaptation) -> None:
        self.module, self.adaptation = module, adaptation
        self.original: Any = vars(module).get("forward")  # with None, use the class's forward, which may be patched
        self.of_class: Any = None
        self.copy: Any = None  # for a compiler

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "of_class": None, "copy": None}

    @property
    def __signature__(self) -> inspect.Signature:
        bound = type(self.module).forward.__get__(self.module) if self.original is None else self.original
        return inspect.signature(bound)

    @property
    def __code__(self) -> CodeType:
        return self.run.__code__  # torch.export reads this

    @torch.compiler.assume_constant_result
    def look_up(self) -> bool:
        """Look up the class's forward method. Dynamo does not do this for classes that it allows in graphs."""
        self.of_class = type(self.module).forward
        return True

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.look_up()
        if self.original is None:
            return self.of_class(self.module, *args, **kwargs)
        return self.original(*args, **kwargs)

    def remove(self) -> None:
        if self.original is None:
            del self.module.forward
        else:
            self.module.forward = self.original


class _ModelForward(_Forward):
    """Replacement for the model's forward method, which provides the positions while it runs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own, local = self.adaptation, self.adaptation.local
        if own.is_fixed:
            output = self.run(*args, **kwargs)
        else:
            before, where = (local.running, local.current), own.positions
            where = None if where is None else _check_positions(_call_positions(where, *args, **kwargs))
            local.running = local.current = _Entry(where, _current_task())
            try:
                with _travel_with_saved_tensors(local):
                    output = self.run(*args, **kwargs)
            finally:
                local.running, local.current = before
        if not own.count_calls():
            others = f" and {len(own.attentions) - 1} more" * (len(own.attentions) > 1)
            raise RuntimeError(
                f"modules: expected attention modules that {type(self.module).__name__}.forward calls, got "
                f"{own.attentions[0].path or 'the model'}{others}, which it didn't call. Select the "
                "modules whose own forward calls scaled_dot_product_attention"
            )
        return output


# --- positions that travel with saved tensors ------------------------------------------------------------------------


def _travel_with_saved_tensors(local: _Local) -> AbstractContextManager[Any]:
    """Pack the tensors that autograd saves together with the positions of the running forward pass.

    The caller's hooks keep working. If hooks are disabled, nothing is packed, because checkpoints can't use hooks
    either.
    """
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or is_transforming():
        return nullcontext()
    if not autograd._saved_tensors_hooks_is_enabled():
        return nullcontext()
    outer = autograd._top_saved_tensors_default_hooks(True)

    def pack(t: Tensor) -> Any:
        return local.running, t._version, t if outer is None else outer[0](t)

    def unpack(packed: Any) -> Tensor:
        entry, version, t = packed
        if outer is None and t._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{t.type()} {list(t.shape)}] is at version {t._version}; expected version {version} instead"
            )
        local.recall(entry)
        return t if outer is None else outer[1](t)

    return saved_tensors_hooks(pack, unpack)


def _check_self_attention(path: str, q: Tensor, k: Tensor) -> None:
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(
            f"{path}: expected q and k of shape (B, H, N, D) in scaled_dot_product_attention, got {tuple(q.shape)} and "
            f"{tuple(k.shape)}. Exclude this module with modules=, or reshape q and k"
        )
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{path}: expected self-attention, where q and k have the same tokens, got {q.shape[2]} and {k.shape[2]} "
            "tokens. Select the self-attention modules with modules=. Key caches are not supported: with models from "
            "transformers, pass use_cache=False"
        )


class _Attention(_Forward):
    """Replacement for an attention module's forward method, which encodes q and k when the module calls SDPA."""

    def __init__(self, module: nn.Module, path: str, adaptation: _Adaptation, layer: int | None) -> None:
        super().__init__(module, adaptation)
        self.path, self.layer = path, layer

    def call(self, *args: Any, **kwargs: Any) -> Any:
        before = self.adaptation.count_calls()
        is_compiling = torch.compiler.is_compiling()
        if is_compiling:
            self.adaptation.update_copies()
        if is_compiling and self.copy is not None:
            output = self.copy(self.module, *args, **kwargs)
        else:
            with _Encode(self, None if is_compiling else _checkpoint_state()):
                output = self.run(*args, **kwargs)
        if self.adaptation.count_calls() == before:
            hint = ""
            if self.original is not None:
                hint = "If a hook skips this module, as diffusers' caches do, add the hook after adapting the model. "
            raise RuntimeError(
                f"{self.path or 'forward'}: expected a call to F.scaled_dot_product_attention, where q and k are "
                f"encoded, got none. {hint}In timm, set `fused_attn = True` on the module. Otherwise, replace the "
                "hand-written attention with\n"
                "    x = F.scaled_dot_product_attention(q, k, v)\n"
                "or encode q and k before it, with an encoding that the module owns:\n"
                "    q, k = self.encoding(q, k, positions=positions)  # (B, H, N, D)"
            )
        return output


def _checkpoint_state() -> tuple[Any, bool]:
    """Return the saved-tensor hooks and the grad mode. A checkpoint inside the attention module would change them."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    return hooks, torch.is_grad_enabled()


class _Encode(TorchFunctionMode):
    """Mode that encodes q and k in SDPA calls. ``state`` is the earlier :func:`_checkpoint_state`, or None."""

    def __init__(self, attention: _Attention, state: tuple[Any, bool] | None) -> None:
        super().__init__()
        self.attention, self.state = attention, state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not SDPA:
            return func(*args, **kwargs) if kwargs else func(*args)
        if self.state is not None:
            self._check(*self.state)
        own = self.attention
        return own.adaptation.attend(own.layer, *args, **(kwargs or {}), path=own.path or "the model")

    def _check(self, hooks: Any, grad_enabled: bool) -> None:
        """Reject encoding inside a checkpoint, because the checkpoint would recompute without this mode."""
        now, is_enabled = _checkpoint_state()
        is_checkpoint = now is not None and now[0].__module__ == "torch.utils.checkpoint"
        if grad_enabled and (not is_enabled or (is_checkpoint and now != hooks)):
            raise RuntimeError(
                f"{self.attention.path}: a checkpoint, no_grad or autograd.Function can't be used between the module's "
                "forward and scaled_dot_product_attention, because the backward pass could run that part without the "
                "encoding. Checkpoint the whole module"
            )


@explain_misplaced_options
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
    """Add an encoding to a model without one. The model is changed in place and returned.

    Self-attention modules encode q and k just before they call ``torch.nn.functional.scaled_dot_product_attention``.
    The model's weights, their names, hooks and classes stay the same. An adapted model works under checkpointing,
    autocast, ``torch.compile``, DDP and FSDP2, and can be copied and pickled. Learned frequencies are parameters at
    ``model.encoding``, so call this before you build the optimiser. Position embeddings that the model adds to its
    tokens remain, unless you remove them yourself.

    Args:
        model: a model such as DiT, SiT, U-ViT, MAE or nanoGPT. For timm's plain ViT, :func:`lrpe_md.adapt` has more
            options.
        encoding: "rotate", "cosine", "mixed", a preset name, a ``Scheme``, a factory, or a module called as
            ``encoding(q, k, positions=positions)`` with q and k (B, H, N, D). See :func:`.encoding.build_encoding`. The
            encoding is moved to the model's device.
        positions: a :class:`Grid` or :class:`Coordinates` for all inputs, or a function that returns one of these from
            the arguments of the model's forward method. The positions must cover all tokens, as ``Grid((H, W),
            prefix=1)`` does if there is a class token. For a preset, return the result of its ``positions()``. Pass
            None if the model's code calls :func:`set_positions` itself.
        modules: name patterns of the self-attention modules, such as "blocks.*.attn". The default matches modules named
            attn, attn1, attention, self_attn or self_attention. If matching modules are nested, only the outermost one
            is used.
        encoding_kwargs: options of the encoding. With ``sharing="layer"``, each layer gets its own encoding.
        num_axes: number of axes. The default is the number of axes of fixed positions, or else 2.
        head_dim, num_heads: sizes of the attention modules. By default, the sizes are read from the modules'
            attributes.
        name: attribute of the model that holds the encoding. If two groups of modules, such as the encoder and decoder
            of an MAE, need different encodings, call ``adapt_attention`` twice with different names.

    The cosine map doubles the width of q and k, but attention keeps the scale of the original head_dim. If q and k
    differ in length, attention raises an error, so exclude cross-attention, and disable key caches.

    Raises:
        TypeError, ValueError: if an argument is invalid, no modules match, or modules are already adapted. After an
            error, the model is unchanged.
        RuntimeError: if an attention module does not call ``scaled_dot_product_attention`` in the forward pass.
    """
    if not isinstance(model, nn.Module) or hasattr(model, "_orig_mod"):
        kind = type(model).__name__
        raise TypeError(f"model: expected an nn.Module that is not compiled, got {kind}; adapt the model first")
    if not callable(positions):
        _check_positions(positions)
    found = _find_attentions(model, modules)
    if hasattr(model, name):
        raise ValueError(
            f"name: expected an attribute name that the model does not use, got {name!r}; choose another name"
        )
    built = _build(encoding, dict(encoding_kwargs or {}), found, positions, (num_axes, head_dim, num_heads))
    model.add_module(name, built.train(model.training))
    adaptation = _Adaptation(model, name, positions)
    by_layer = EncodingStack(built).by_layer
    for i, (path, module) in enumerate(found.items()):
        attention = _Attention(module, path, adaptation, i if by_layer else None)
        adaptation.attentions.append(attention)
        # Set a method, because Dynamo guards on an object's id, and would compile each block separately.
        module.forward = attention.call
    model.forward = _ModelForward(model, adaptation)
    return model


def restore_attention(model: Model) -> Model:
    """Undo :func:`adapt_attention` in place.

    Raises:
        ValueError: if a forward method was replaced after adapting, for example by an offloading hook.
    """
    found = [attention for attention in map(find_adapted_forward, model.modules()) if attention is not None]
    chain = list(_forwards_of(model))
    for own in {attention.adaptation for attention in found}:
        replaced = [a.path for a in own.attentions if vars(a.module).get("forward") != a.call]
        if replaced or own not in [forward.adaptation for forward in chain]:
            raise ValueError(
                f"model: expected the forward methods that adapt_attention set, got a different one in "
                f"{(replaced or ['the model'])[0]}. Undo that change first"
            )
    for forward in chain:
        forward.remove()
        delattr(model, forward.adaptation.name)
        for attention in forward.adaptation.attentions:
            attention.remove()
    return model


def set_positions(model: nn.Module, positions: Where, name: str = "encoding") -> None:
    """Set the positions from inside the forward method of an adapted model.

    Use this in models that choose their tokens during the forward pass, such as an MAE that draws the patches to keep.
    The positions apply to all subsequent attention modules until the forward pass ends. Call this function outside of
    checkpointed code. ``model`` and ``name`` are those passed to :func:`adapt_attention`.

    Raises:
        ValueError: if there is no adaptation with this name, if positions are fixed, or if no forward pass is running.
    """
    _check_positions(positions)
    own = next((f.adaptation for f in _forwards_of(model) if f.adaptation.name == name), None)
    if own is None or own.is_fixed or own.local.running is None:
        raise ValueError(
            f"model: set_positions needs a model that is adapted with name={name!r}, without fixed positions, and "
            f"is running its forward pass, got {type(model).__name__}. Call it from inside forward()"
        )
    own.local.running = own.local.current = own.local.running._replace(positions=positions)


def find_adapted_forward(module: nn.Module) -> _Attention | None:
    """Return the object that adapt_attention created to run a module's forward method, or None."""
    owner = getattr(vars(module).get("forward"), "__self__", None)
    return owner if isinstance(owner, _Attention) else None


def _forwards_of(model: nn.Module) -> Iterator[_ModelForward]:
    """Yield the forward methods that adapt_attention has set, latest first."""
    forward = vars(model).get("forward")
    while isinstance(forward, _ModelForward):
        yield forward
        forward = forward.original


def _find_attentions(model: nn.Module, modules: str | Sequence[str] | None) -> dict[str, nn.Module]:
    patterns = (modules,) if isinstance(modules, str) else modules
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, (nn.Identity, *_LISTS)) or any(f".{path}".startswith(f".{outer}.") for outer in found):
            continue
        if path.split(".")[-1] in NAMES if patterns is None else any(fnmatchcase(path, each) for each in patterns):
            found[path] = module
            if not path:  # the model itself
                break
    if not found:
        raise ValueError(_describe_missing(model, modules))
    rotary = [path for path in find_rotary(model) if any(f"{path}.".startswith(f"{outer}.") for outer in found)]
    if rotary:
        raise ValueError(
            f"modules: expected attention modules without an encoding, got {min(rotary)}, which already rotates q and "
            "k. Use adapt_rotary(model) to run its rotation with this library, or name other modules in modules="
        )
    for path, module in found.items():
        if find_adapted_forward(module) is not None:
            raise ValueError(
                f"modules: expected modules that are not adapted, got {path}; call restore_attention first"
            )
        if _has_encoding(model, path):
            raise ValueError(
                f"modules: expected attention modules without an encoding, got {path}, which already encodes q and k "
                "with this library. Remove its encoding first, as adapt(model, 'none') does for timm's ViTs, or name "
                "other modules in modules="
            )
        if isinstance(module, nn.MultiheadAttention):
            raise TypeError(
                f"modules: expected attention modules that call scaled_dot_product_attention, got {path}, an "
                "nn.MultiheadAttention, which may run as one fused operator. Exclude this module, or write its "
                "attention with F.scaled_dot_product_attention"
            )
    return found


def _has_encoding(model: nn.Module, path: str) -> bool:
    """Return whether an attention module already encodes q and k, with its own encoding or its backbone's."""
    module, names = model.get_submodule(path), path.split(".")
    if any(isinstance(inner, FrequencyModule) for inner in module.modules()):
        return True
    owners = [model.get_submodule(".".join(names[:i])) for i in range(len(names))]
    return hasattr(module, "takes_context") and any(o._modules.get("encoding") is not None for o in owners)


def _describe_missing(model: nn.Module, modules: str | Sequence[str] | None) -> str:
    paths = [path for path, module in model.named_modules() if [*module.children()] and not isinstance(module, _LISTS)]
    names = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", path) for path in paths if path))
    likely = [name for name in names if "att" in name.split(".")[-1].lower()] or names or ["blocks.*.attn"]
    missing = f"None, and no module is named {', '.join(NAMES)}" if modules is None else f"{modules!r}, without a match"
    return f"modules: expected patterns of names such as {', '.join(likely[:8])}, got {missing}"


def _build(
    encoding: Any,
    kwargs: dict[str, Any],
    found: dict[str, nn.Module],
    positions: Any,
    given: tuple[int | None, int | None, int | None],
) -> nn.Module:
    """Build one encoding for all attention modules, or one for each. ``given`` is (num_axes, head_dim, num_heads)."""
    num_axes, head_dim, num_heads = given
    if num_axes is None:
        num_axes = positions.shape[-1] if isinstance(positions, Tensor) else getattr(positions, "num_axes", 2)
    if not isinstance(encoding, nn.Module) and (head_dim is None or num_heads is None):
        read = {_read_heads(path, module, head_dim, num_heads) for path, module in found.items()}
        if len(read) > 1:
            raise ValueError(
                f"modules: expected attention modules with the same head_dim and num_heads, got {sorted(read)}. Adapt "
                "each group separately, with modules= and name="
            )
        own = read.pop()
        head_dim, num_heads = head_dim or own[0], num_heads or own[1]
    built = build_encoding(encoding, kwargs, head_dim or 0, num_heads or 0, len(found), num_axes)
    if built is None:
        raise ValueError(f"encoding: expected an encoding, got {encoding!r}")
    if isinstance(built, nn.ModuleList) and len(built) != len(found):
        raise ValueError(
            f"encoding: expected one module for each of the {len(found)} attention modules, got {len(built)}"
        )
    device = next((t.device for module in found.values() for t in module.parameters()), None)
    return built if device is None else built.to(device)


def _read_heads(path: str, module: nn.Module, head_dim: int | None, num_heads: int | None) -> tuple[int, int]:
    for source in (module, getattr(module, "config", None)):
        groups = [[getattr(source, name, None) for name in names] for names in (_HEADS, _HEAD_DIM, _WIDTH)]
        heads, size, width = (next((n for n in each if isinstance(n, int) and n > 0), None) for each in groups)
        if heads and width and not size:
            size = width // heads
        size, heads = size or head_dim, heads or num_heads
        if size and heads:
            return size, heads
    raise ValueError(
        f"head_dim, num_heads: expected both as arguments or as attributes of {path}, got head_dim={head_dim} and "
        f"num_heads={num_heads} as arguments. Pass the missing values, as in adapt_attention(..., head_dim=64, "
        "num_heads=12)"
    )
