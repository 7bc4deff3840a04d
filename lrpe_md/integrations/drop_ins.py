"""Replace somebody else's rotary function by an equal one that runs our kernel.

The function is called with small tensors to find out which entry of which table turns which channel
(:mod:`.probing`). The function in its place arranges the caller's own tables as views and hands them to
:func:`lrpe_md.rotate` (:mod:`.plans`). Calls that were found to be anything else go to the original.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.call import Impl
from .plans import EQUAL, MORE, Plan, Recipe, Unlike, describe, flatten, prepare, relate, run
from .probing import find_plan, quietly

__all__ = ["drop_in"]

_MOST_PLANS = 256  # of one function; calls beyond go to the original
_DATA = re.compile(r"x|t|xq|xk|x_in|tensors?|hidden_states|([qkv]|query|key|value|queries|keys|values)(_\w+)?")
_TABLES = re.compile(r"cos|sin|freq|rope|rot|emb|angle|theta|cis|table|pe$")
_HEAD_DIM = 24  # of the first probes: halves, thirds and quarters are even or whole
_EMPTY = inspect.Parameter.empty
_MOST_ANSWERS = 4  # kinds of arguments for which it runs and is no rotation, before it is given up
_MOST_RECIPES = 64  # of one function, kept from call to call
_GPU = "cuda"  # for functions that take no tensors on the CPU
_MISSING: Any = object()
_CONSTANTS = (int, float, bool, str)


def drop_in(function: Callable[..., Any], *, impl: Impl = "auto") -> Callable[..., Any]:
    """Return an equal function that runs our kernel, with the same signature.

    Args:
        function: turns x, or q and k, by tables: cos and sin as two arguments, a tuple or one tensor, complex numbers,
            2 × 2 matrices, or angles; of any usual layout. Or a module, or a method of an object, that reads cos and
            sin from tensors of its own; these are read again at each call. It is called with small tensors on the CPU
            (on a GPU if it takes no others), on a copy of its object.
        impl: see :func:`lrpe_md.rotate`.

    Returns:
        A function with the attribute ``original``. Kinds of arguments (ranks, widths, dtypes, values of flags) are
        probed when they first come, also while a graph is compiled; those that the kernel can't do go to the original.
        Outputs have the original's dtype, and x's memory order. Arithmetic is float32 (float64 for float64), where the
        original may round to bfloat16 in between. Tables get their gradient where the original gives them one.

    Raises:
        TypeError: the function does not turn pairs of channels by its tables; says what it does.
    """
    result = quietly(lambda: _search(function, "cpu"))
    if isinstance(result, Unlike) and result.depth == 0 and torch.cuda.is_available():
        on_gpu = quietly(lambda: _search(function, _GPU))
        result = on_gpu if not isinstance(on_gpu, Unlike) or on_gpu.depth else result
    if isinstance(result, Unlike):
        name = getattr(function, "__qualname__", type(function).__name__)
        expected = "expected one that rotates pairs of channels by tables of cos and sin"
        raise TypeError(f"function: {expected}, got {name}, which {result}")
    return _replace(function, result, impl)


def _search(function: Callable[..., Any], device: str) -> _Probed | Unlike:
    """Try roles of the parameters, and kinds of arguments, until one is a rotation."""
    failure, num_answers = Unlike(-1, "takes no tensors that look like q, k and tables"), 0
    for signature, keys in _read_signatures(function):
        probed = _Probed(function, signature, device)
        for key, relation in itertools.product(keys, (MORE, EQUAL) if signature.attributes else (EQUAL,)):
            plan = probed.probe(key, relation * sum(isinstance(e, tuple) and e[0] == "data" for e in key))
            if isinstance(plan, Plan):
                probed.key, probed.relation = key, relation
                return probed
            failure = max(failure, plan, key=lambda e: e.depth)
            num_answers += plan.depth >= 4
            if num_answers == _MOST_ANSWERS:
                return failure
    return failure


class _Signature(NamedTuple):
    """The parameters of a function; which of them are turned; what it may read of its object: tensors and settings."""

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    num_positional: int
    data: frozenset[int]
    offsets: frozenset[int]
    owner: Any = None
    attributes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


class _Probed:
    """A function with the plans for the kinds of arguments that came so far."""

    def __init__(self, function: Callable[..., Any], signature: _Signature, device: str) -> None:
        self.function, self.signature, self.device = function, signature, device
        self.plans: dict[Any, Plan | Unlike] = {}
        self.key: tuple[Any, ...] = ()  # the first kind of arguments that it took
        self.relation = EQUAL  # of its rows to tokens

    def find(self, key: tuple[Any, ...], relations: str) -> Plan | Unlike:
        """Return the plan for a kind of arguments, probed when it first comes."""
        plan = self.plans.get((key, relations))
        if plan is None:
            if len(self.plans) >= _MOST_PLANS:
                return Unlike(0, f"was called with more than {_MOST_PLANS} kinds of arguments")
            plan = quietly(lambda: self.probe(key, relations))
        return plan

    def probe(self, key: tuple[Any, ...], relations: str) -> Plan | Unlike:
        """Probe one kind of arguments, and note the plan."""
        try:
            plan: Plan | Unlike = find_plan(self.call, key, relations, self.device)
        except Unlike as e:
            plan = e.with_traceback(None)
        self.plans[key, relations] = plan
        return plan

    def call(self, values: list[Any], tensors: list[Tensor]) -> Any:
        """Call the original, on a copy of its object with other tensors."""
        signature = self.signature
        split = signature.num_positional
        args, kwargs = values[:split], dict(zip(signature.names[split:], values[split:], strict=True))
        if signature.owner is None:
            return self.function(*args, **kwargs)
        replaced = copy.copy(signature.owner)
        if hasattr(replaced, "__dict__"):  # what the function stores must not arrive in the object
            vars(replaced).update({n: copy.copy(v) for n, v in vars(replaced).items() if type(v) in (dict, list, set)})
        for name, t in zip(signature.attributes, tensors, strict=True):
            group = next((g for g in ("_parameters", "_buffers") if name in vars(replaced).get(g, {})), None)
            (vars(replaced) if group is None else vars(replaced)[group])[name] = t
        return _unbound(self.function)(replaced, *args, **kwargs)


def _unbound(function: Any) -> Callable[..., Any]:
    return type(function).forward if isinstance(function, nn.Module) else function.__func__


# --- the signature ------------------------------------------------------------------------------------------------


def _read_signatures(function: Callable[..., Any]) -> Iterator[tuple[_Signature, list[tuple[Any, ...]]]]:
    """Yield which parameters may be turned, and kinds of arguments to try; by their names first."""
    try:
        parameters = list(inspect.signature(_forward(function)).parameters.values())
    except (TypeError, ValueError) as e:
        raise TypeError(f"function: expected a function or a module, got {function!r}: {e}") from e
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    offsets = frozenset(i for i, p in enumerate(named) if "offset" in p.name and type(p.default) is int)
    base = _Signature(
        tuple(p.name for p in named), tuple(p.default for p in named), sum(p.kind != p.KEYWORD_ONLY for p in named),
        frozenset(), offsets,
    )  # fmt: skip
    open_ones = [i for i, p in enumerate(named) if p.default is _EMPTY or p.default is None]
    data = {i for i in open_ones if _DATA.fullmatch(named[i].name)}
    tables = {
        i for i in open_ones if i not in data and _TABLES.search(named[i].name) and "section" not in named[i].name
    }
    required = {i for i in open_ones if named[i].default is _EMPTY}
    owner = getattr(function, "__self__", function if isinstance(function, nn.Module) else None)
    owners: list[tuple[Any, tuple[str, ...]]] = [(owner, ())]
    if owner is not None and not inspect.isclass(owner) and (attributes := _own_tensors(owner)):
        owners.append((owner, attributes))
    for (at, attributes), (data_indices, table_indices) in itertools.product(owners, _roles(data, tables, required)):
        signature = base._replace(data=frozenset(data_indices), owner=at, attributes=attributes, settings=_settings(at))
        yield signature, list(_first_keys(signature, data_indices, table_indices, required))


def _forward(function: Any) -> Callable[..., Any]:
    return function.forward if isinstance(function, nn.Module) else function


def _own_tensors(owner: Any) -> tuple[str, ...]:
    """The names of the floating-point tensors that an object holds itself."""
    held = dict(vars(owner)) if hasattr(owner, "__dict__") else {}
    if isinstance(owner, nn.Module):
        held = {**held, **owner._buffers, **owner._parameters}
    return tuple(
        n for n, t in held.items() if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) and t.ndim > 1
    )


def _settings(owner: Any) -> tuple[str, ...]:
    """The names of the numbers, flags and strings that an object holds."""
    held = vars(owner) if hasattr(owner, "__dict__") and not inspect.isclass(owner) else {}
    return tuple(name for name, value in held.items() if isinstance(value, (bool, int, float, str)))


def _roles(data: set[int], tables: set[int], required: set[int]) -> Iterator[tuple[set[int], set[int]]]:
    """Yield which parameters are turned and which are tables."""
    if data and required <= data | tables:
        yield data, tables
        if not data | tables <= required and data & required:
            yield data & required, tables & required
        return
    if data:
        yield data, tables
    others = sorted(required)
    for count in (1, 2):
        for chosen in itertools.combinations(others, count):
            yield set(chosen), set(others) - set(chosen)


def _first_keys(
    signature: _Signature, data_indices: set[int], table_indices: set[int], required: set[int]
) -> Iterator[tuple[Any, ...]]:
    """Yield kinds of arguments to try."""
    rest = [i for i in sorted(required) if i not in data_indices and i not in table_indices]
    options = itertools.product(
        (4, 3, 2), _head_dims(signature), _table_forms(len(table_indices)), _other_values(signature, rest)
    )
    for rank, head_dim, forms, others in options:
        entries: list[Any] = []
        of_tables, of_rest = iter(forms), iter(others)
        for i, default in enumerate(signature.defaults):
            if i in data_indices:
                entries.append(("data", rank, torch.float32, head_dim))
            elif i in table_indices:
                entries.append(next(of_tables))
            else:
                entries.append(next(of_rest) if i in rest else describe(default, False))
        yield (*entries, *_describe_owner(signature))


def _describe_owner(signature: _Signature) -> list[tuple[Any, ...]]:
    """Return what a plan depends on of a function's object."""
    entries: list[tuple[Any, ...]] = []
    for name in signature.attributes:
        t = getattr(signature.owner, name)
        entries.append(("attribute", tuple(t.shape), t.dtype) if isinstance(t, Tensor) else ("unknown",))
    return [*entries, ("settings", *[describe(getattr(signature.owner, name), False) for name in signature.settings])]


def _head_dims(signature: _Signature) -> list[int]:
    """Widths to try: those that tables of an object's own may be for."""
    shapes = [entry[1] for entry in _describe_owner(signature) if entry[0] == "attribute"]
    widths = [n * m for shape in shapes for n in shape[-2:] for m in (1, 2)]
    return sorted({n for n in widths if n % 2 == 0 and n > 2}) if shapes else [_HEAD_DIM]


def _table_forms(count: int) -> list[tuple[Any, ...]]:
    """Descriptions of so many arguments that are tables."""
    real, width = torch.float32, _HEAD_DIM
    if not count:
        return [()]
    if count > 1:
        return [(("table", n + 1, real, w),) * count for n in (2, 1, 3) for w in (width, width // 2)]
    one: list[Any] = []
    for n in (2, 1, 3):
        one += [("tuple", *[("table", n + 1, real, w)] * 2) for w in (width, width // 2)]
        one += [("table", n + 1, torch.complex64, width // 2)]
        one += [("table", n + 3, real, width // 2, 2, 2), ("table", n + 2, real, width // 2, 2)]
        one += [("table", n + 1, real, w) for w in (width, 2 * width, width // 2)]
    one.append(("tuple", *[("tuple", *[("table", 2, real, width // 3)] * 2)] * 3))  # by axis
    return [(form,) for form in one]


def _other_values(signature: _Signature, rest: list[int]) -> Iterator[tuple[Any, ...]]:
    """Values for parameters that are neither turned nor tables, and have no default."""
    options: list[list[Any]] = []
    for i in rest:
        name = signature.names[i]
        if "section" in name:
            options.append([("list", 3, 4, 5), ("list", 3, 3, 3, 3)])
        elif "dim" in name:
            options.append([1, 2, -1, -2])
        elif "pos" in name or "ids" in name or "grid" in name:
            ids = [("integers", n, torch.int64) for n in (2, 1)]
            options.append([*ids, ("integers", 3, torch.int64, 2), ("tuple", *ids[:1] * 3)])
        else:
            options.append([None])
    return itertools.product(*options)


# --- the function in its place ------------------------------------------------------------------------------------


def _bind(signature: _Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return the arguments in the order of the parameters; None for a call that the signature does not take."""
    if len(args) > signature.num_positional:
        return None
    values: list[Any] = list(args)
    used = 0
    for i in range(len(args), len(signature.names)):
        name = signature.names[i]
        if name in kwargs:
            values.append(kwargs[name])
            used += 1
        elif signature.defaults[i] is _EMPTY:
            return None
        else:
            values.append(signature.defaults[i])
    return values if used == len(kwargs) else None


def _replace(function: Callable[..., Any], probed: _Probed, impl: Impl) -> Callable[..., Any]:
    signature = probed.signature
    defaults = signature.defaults
    module = signature.owner if isinstance(signature.owner, nn.Module) else None
    least = sum(default is _EMPTY for default in defaults)
    recipes: dict[Any, Recipe | None] = {}

    def find(key: tuple[Any, ...], relations: str) -> Plan | None:
        plan = probed.find(key, relations)
        return plan if isinstance(plan, Plan) else None

    # As torch.compiler.assume_constant_result does (torch 2.15), which would import the compiler: called while a graph
    # is traced, with what the trace knows as constants.
    find._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not least <= len(args) <= signature.num_positional:
            values = _bind(signature, args, kwargs)
        else:
            values = (*args, *defaults[len(args) :])
        if values is None or (module is not None and _is_changed(module)):
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            xs, leaves = _split(signature, values)
            recipe = _resolve(probed, find, values)
        else:
            sizes, xs, leaves = _measure(signature, values)
            recipe = recipes.get(sizes, _MISSING)
            if recipe is _MISSING:
                recipe = _resolve(probed, find, values)
                if sizes is not None:
                    if len(recipes) >= _MOST_RECIPES:
                        recipes.clear()
                    recipes[sizes] = recipe
        if recipe is None or not (recipe.plan.ignores_autocast or not torch.is_autocast_enabled(xs[0].device.type)):
            return function(*args, **kwargs)
        out = run(recipe, xs, leaves, impl)
        return function(*args, **kwargs) if out is None else out

    functools.update_wrapper(replacement, _forward(function), updated=())
    replacement.original, replacement.probed = function, probed  # pyright: ignore[reportFunctionMemberAccess]
    return replacement


def _split(signature: _Signature, values: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that are turned, and all others."""
    xs: list[Tensor] = []
    leaves: list[Tensor] = []
    for i, value in enumerate(values):
        (xs if i in signature.data else leaves).extend(flatten(value))
    if signature.owner is not None:
        leaves.extend([getattr(signature.owner, name) for name in signature.attributes])
    return xs, leaves


def _measure(signature: _Signature, values: Sequence[Any]) -> tuple[Any, list[Tensor], list[Tensor]]:
    """Split the tensors, and return all that a recipe depends on; None for what is not worth keeping. Without calls."""
    sizes: list[Any] = []
    xs: list[Tensor] = []
    leaves: list[Tensor] = []
    for i, value in enumerate(values):
        group = xs if i in signature.data else leaves
        sizes.append(type(value))
        each: Any
        for each in value if type(value) is tuple or type(value) is list else (value,):
            kind = type(each)
            if kind is Tensor or kind is nn.Parameter:
                sizes += (each.shape, each.dtype, each.device)
                group.append(each)
            elif each is None or kind in _CONSTANTS:
                sizes += (kind, each)
            else:
                return None, *_split(signature, values)
        if i in signature.offsets and values[i]:
            return None, *_split(signature, values)
    for name in signature.attributes:
        each = getattr(signature.owner, name)
        if not isinstance(each, Tensor):
            return None, *_split(signature, values)
        sizes += (each.shape, each.dtype, each.device)
        leaves.append(each)
    for name in signature.settings:
        each = getattr(signature.owner, name)
        if type(each) not in _CONSTANTS:
            return None, *_split(signature, values)
        sizes += (type(each), each)
    return tuple(sizes), xs, leaves


def _resolve(probed: _Probed, find: Callable[..., Plan | None], values: Sequence[Any]) -> Recipe | None:
    """Find the plan for a call, and return it worked out for its sizes; None for what goes to the original."""
    signature = probed.signature
    key: list[Any] = []
    offset = 0
    for i, value in enumerate(values):
        if i in signature.offsets and isinstance(value, int) and value:
            key.append(("offset",))
            offset = value
        else:
            key.append(describe(value, i in signature.data))
    if signature.owner is not None:
        key.extend(_describe_owner(signature))
    xs, leaves = _split(signature, values)
    for relation in (MORE,) if offset else (probed.relation, EQUAL):
        plan = find(tuple(key), relation * len(xs))
        if plan is not None:
            break
    else:
        return None
    relations = relate(plan, xs, leaves, offset)
    if relations is not None and relations != plan.relations:
        plan = find(tuple(key), relations)
        relations = None if plan is None else relate(plan, xs, leaves, offset)
    return None if plan is None or relations != plan.relations else prepare(plan, xs, leaves, offset)


def _is_changed(module: nn.Module) -> bool:
    """Say whether a module has hooks, or a forward of its own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)
