"""Replace third-party rotary functions with equivalent functions that run our kernel.

We call the function with small tensors to find out which table entry rotates which channel (:mod:`.probing`). The
replacement passes views of the caller's tables to :func:`lrpe_md.rotate` (:mod:`.plans`). Unsupported calls go to the
original function.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.core.call import Impl
from .norms import is_plain_module
from .plans import EQUAL, MORE, PreparedCall, RotationPlan, Unlike, describe, prepare, run_prepared
from .probing import find_plan, get_forward, quietly

__all__ = ["drop_in"]

_MOST_PLANS = 256  # per function; any further kinds of calls go to the original
_DATA = re.compile(r"x|t|xq|xk|x_in|tensors?|hidden_states|([qkv]|query|key|value|queries|keys|values)(_\w+)?")
_TABLES = re.compile(r"cos|sin|freq|rope|rot|emb|angle|theta|cis|table|pe$")
_OFFSETS = re.compile(r"offset|start_pos|past")  # numbers of tokens before x
_PLACES = re.compile(r"pos|ids|idx|index|indices|grid")  # table rows or coordinates of the tokens of x
_HEAD_DIM = 24  # head_dim of the first probes, which 2, 3 and 4 divide
_EMPTY = inspect.Parameter.empty
_MOST_ANSWERS = 4  # give up after this many kinds of arguments for which the function runs but is not a rotation
_MOST_RECIPES = 64  # cached per function
_GPU = "cuda"  # for functions that reject CPU tensors
_CONSTANTS = (int, float, bool, str, type(None))
_NUMBERS = (int, float, "int", "float")  # annotations of parameters that are not tensors


def drop_in(function: Callable[..., Any], *, impl: Impl = "auto") -> Callable[..., Any]:
    """Return an equivalent function with the same signature that runs our kernel.

    Args:
        function: function that rotates x, or q and k, by tables in any common layout. The tables can be cos and sin (as
            two arguments, a tuple or one tensor), complex numbers, 2 × 2 matrices, or angles. The function may also be
            a module or bound method that reads cos and sin from its own tensors at each call. The result must not
            depend on any other tensor, such as a global variable or a learned scale in ``self.scale``. We probe the
            function with small tensors and a copy of its object, on the CPU or, if it rejects CPU tensors, on a GPU.
            The function must therefore not behave differently at larger sizes or positions, for example by scaling
            frequencies beyond 4,096 tokens. Parameter names, such as ``cos``, ``freqs``, ``position_ids`` and ``idx``,
            suggest which roles to try first. A number whose name contains ``offset``, ``start_pos`` or ``past`` is
            taken as the row of the first token if the probe confirms this. Numbers, flags and strings that are
            attributes of the object are read at each call. After changing any other number, flag or function that the
            function reads, such as a global variable or a value in ``module.config``, call ``drop_in`` again.
        impl: see :func:`lrpe_md.rotate`.

    Returns:
        the new function, which has the given function as its attribute ``original``. The first call with a new kind of
        arguments (ranks, widths, dtypes, flags) probes the function, even while a graph is compiled. If the kernel does
        not support a kind of arguments, the original runs. Outputs have the original's dtype and x's memory order.
        Arithmetic is in float32 (or in float64 for float64 inputs), even if the original rounds intermediate results to
        bfloat16. Tables receive gradients whenever the original computes them.

    Raises:
        TypeError: if the function does not use its tables to rotate pairs of channels. The message says what the
            function does instead.
    """
    result = quietly(lambda: _search(function, "cpu"))
    if isinstance(result, Unlike) and result.depth == 0 and torch.cuda.is_available():
        on_gpu = quietly(lambda: _search(function, _GPU))
        result = on_gpu if not isinstance(on_gpu, Unlike) or on_gpu.depth else result
    if isinstance(result, Unlike):
        name = getattr(function, "__qualname__", type(function).__name__)
        expected = "expected a function that rotates channel pairs by cos and sin tables"
        raise TypeError(f"function: {expected}, got {name}, which {result}")
    return _replace(function, result, impl)


class _Probed:
    """A function, the parameters that it rotates, and the plans for all kinds of arguments seen so far."""

    def __init__(self, function: Callable[..., Any], device: str, parameters: list[inspect.Parameter]) -> None:
        self.function, self.device = function, device
        self.names = tuple(p.name for p in parameters)
        self.defaults = tuple(p.default for p in parameters)
        self.num_positional = sum(p.kind != p.KEYWORD_ONLY for p in parameters)
        numbers = [i for i, p in enumerate(parameters) if p.default is _EMPTY or type(p.default) is int]
        self.offsets = frozenset(i for i in numbers if _OFFSETS.search(parameters[i].name))
        self.data: frozenset[int] = frozenset()
        self.owner = getattr(function, "__self__", function if isinstance(function, nn.Module) else None)
        held = {} if inspect.isclass(self.owner) else dict(getattr(self.owner, "__dict__", {}))
        self.settings = tuple(name for name, value in held.items() if isinstance(value, (bool, int, float, str)))
        if isinstance(self.owner, nn.Module):
            held |= {**self.owner._buffers, **self.owner._parameters}
        tensors = {name: t for name, t in held.items() if isinstance(t, Tensor) and t.ndim > 1}
        self.own_tensors = tuple(name for name, t in tensors.items() if t.is_floating_point() or t.is_complex())
        integers = [(n, t) for n, t in held.items() if isinstance(t, Tensor) and t.dtype in (torch.int32, torch.int64)]
        self.counters = tuple(name for name, t in integers if t.numel() == 1 and not t.is_meta)
        self.attributes: tuple[str, ...] = ()  # those of own_tensors that are tables
        self.plans: dict[Any, RotationPlan | Unlike] = {}
        self.key: tuple[Any, ...] = ()  # the first kind of arguments that worked
        self.relation = EQUAL  # how the number of table rows relates to the number of tokens

    def describe_owner(self) -> list[tuple[Any, ...]]:
        tensors = [getattr(self.owner, name) for name in self.attributes]
        entries = [("attribute", tuple(t.shape), t.dtype) if isinstance(t, Tensor) else ("unknown",) for t in tensors]
        return [*entries, ("settings", *[describe(getattr(self.owner, name), False) for name in self.settings])]

    def find(self, key: tuple[Any, ...], relations: str) -> RotationPlan | None:
        """Return the plan for a kind of arguments, or None if it is not supported. Probe new kinds first."""
        if (key, relations) not in self.plans and len(self.plans) < _MOST_PLANS:
            quietly(lambda: self.probe(key, relations))
        plan = self.plans.get((key, relations))
        return plan if isinstance(plan, RotationPlan) else None

    # Like torch.compiler.assume_constant_result, but without importing the compiler. All arguments are constants.
    find._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]

    def probe(self, key: tuple[Any, ...], relations: str) -> RotationPlan | Unlike:
        try:
            plan = find_plan(self.call, key, relations, self.device)
        except Unlike as e:
            plan = e.with_traceback(None)
        self.plans[key, relations] = plan
        return plan

    def call(self, values: list[Any], tensors: list[Tensor]) -> Any:
        """Call the original on a copy of its object with the given tensors."""
        args, names = values[: self.num_positional], self.names[self.num_positional :]
        kwargs = dict(zip(names, values[self.num_positional :], strict=True))
        if self.owner is None:
            return self.function(*args, **kwargs)
        replaced = copy.copy(self.owner)
        if hasattr(replaced, "__dict__"):  # the function must not modify the original object
            vars(replaced).update({n: copy.copy(v) for n, v in vars(replaced).items() if type(v) in (dict, list, set)})
        counters = [(name, getattr(self.owner, name)) for name in self.counters]
        for name, t in (*zip(self.attributes, tensors, strict=True), *[(name, t.clone()) for name, t in counters]):
            group = next((g for g in ("_parameters", "_buffers") if name in vars(replaced).get(g, {})), None)
            (vars(replaced) if group is None else vars(replaced)[group])[name] = t
        is_module = isinstance(self.function, nn.Module)
        unbound = type(self.function).forward if is_module else self.function.__func__  # pyright: ignore[reportFunctionMemberAccess]
        out = unbound(replaced, *args, **kwargs)
        for name, value in (*[(name, getattr(self.owner, name)) for name in self.settings], *counters):
            if getattr(replaced, name) != value:  # the replacement would not change it
                raise Unlike(3, f"changes the attribute {name} of its object at each call")
        return out

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Return the arguments in parameter order, or None if the function does not accept the call."""
        values, given = [*args, *self.defaults[len(args) :]], 0
        for i in range(len(args), len(self.names)):
            if self.names[i] in kwargs:
                values[i], given = kwargs[self.names[i]], given + 1
            elif values[i] is _EMPTY:
                return None
        return values if given == len(kwargs) and len(args) <= self.num_positional else None

    def measure(self, values: Sequence[Any]) -> tuple[Any, list[Tensor], list[Tensor]]:
        """Return everything on which a recipe depends, the tensors to rotate, and all other tensors."""
        sizes: list[Any] = []
        xs: list[Tensor] = []
        leaves: list[Tensor] = []
        todo: list[tuple[Any, list[Tensor]]] = []
        for i, value in enumerate(values):
            todo.append((value, xs if i in self.data else leaves))
        for name in (*self.attributes, *self.settings):
            todo.append((getattr(self.owner, name), leaves))
        todo.reverse()
        while todo:
            value, tensors = todo.pop()
            kind = type(value)
            sizes.append(kind)
            if kind is Tensor or kind is nn.Parameter:
                sizes += (value.shape, value.dtype, value.device)
                tensors.append(value)
            elif kind is tuple or kind is list:
                sizes.append(len(value))
                for each in reversed(value):
                    todo.append((each, tensors))
            elif isinstance(value, Tensor):
                sizes.append(object())  # never equal to another call's sizes
                tensors.append(value)
            else:
                sizes.append(value if kind in _CONSTANTS else describe(value, False))
        return tuple(sizes), xs, leaves

    def resolve(self, values: Sequence[Any], xs: list[Tensor], leaves: list[Tensor]) -> PreparedCall | None:
        """Return the recipe for a call's kind and sizes, or None if the original must run."""
        entries, offset = [], 0
        for i, value in enumerate(values):
            is_offset = i in self.offsets and isinstance(value, int) and value
            offset = value if is_offset else offset
            entries.append(("offset",) if is_offset else describe(value, i in self.data))
        key = (*entries, *self.describe_owner())
        plan = self.find(key, (MORE if offset else self.relation) * len(xs))
        plan = self.find(key, EQUAL * len(xs)) if plan is None and not offset else plan
        for _ in range(2):  # the second time, with the plan for these sizes
            recipe = None if plan is None else prepare(plan, xs, leaves, offset)
            if recipe is None or recipe.relations == recipe.plan.relations:
                return recipe
            plan = self.find(key, recipe.relations)
        return None


def _search(function: Callable[..., Any], device: str) -> _Probed | Unlike:
    failure, num_answers = Unlike(-1, "has no tensor arguments that look like q, k and tables"), 0
    for probed, keys in _read_signatures(function, device):
        for key, relation in itertools.product(keys, (MORE, EQUAL) if probed.attributes else (EQUAL,)):
            plan = probed.probe(key, relation * sum(isinstance(e, tuple) and e[0] == "data" for e in key))
            if isinstance(plan, RotationPlan):
                probed.key, probed.relation = key, relation
                return probed
            failure = max(failure, plan, key=attrgetter("depth"))
            num_answers += plan.depth >= 4
            if num_answers == _MOST_ANSWERS:
                return failure
    return failure


def _read_signatures(function: Callable[..., Any], device: str) -> Iterator[tuple[_Probed, Iterator[tuple[Any, ...]]]]:
    """Yield candidates for the parameters to rotate and the kinds of arguments. Likely names come first."""
    try:
        parameters = list(inspect.signature(get_forward(function)).parameters.values())
    except (TypeError, ValueError) as e:
        raise TypeError(f"function: expected a function or a module, got {function!r}: {e}") from e
    parameters = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = {i: p.name for i, p in enumerate(parameters) if p.default is _EMPTY or p.default is None}
    required = {i for i in names if parameters[i].default is _EMPTY}
    numbers = {i for i in names if parameters[i].annotation in _NUMBERS}
    data = {i for i, name in names.items() if _DATA.fullmatch(name)} - numbers
    tables = {i for i, name in names.items() if _TABLES.search(name) and "section" not in name} - data - numbers
    roles = [(data, tables), (data & required, tables & required)][: 1 if data | tables <= required else 2]
    if not data or not required <= data | tables:
        tensors = required - numbers
        places = {i for i in tensors if _PLACES.search(names[i])}  # these may also be tables
        pools = [tensors - places, tensors] if places else [tensors]
        chosen = [(pool, {*each}) for pool in pools for n in (1, 2) for each in itertools.combinations(sorted(pool), n)]
        named = data & required
        roles = [(data, tables), *[(named, pool - named) for pool in pools], *[(xs, pool - xs) for pool, xs in chosen]]
    for reads_tensors, (of_x, of_tables) in itertools.product((False, True), roles):
        probed = _Probed(function, device, parameters)
        probed.data, probed.attributes = frozenset(of_x), probed.own_tensors if reads_tensors else ()
        if of_x and (probed.attributes or not reads_tensors):
            yield probed, _first_keys(probed, of_tables, required - of_x - of_tables)


def _first_keys(probed: _Probed, tables: set[int], rest: set[int]) -> Iterator[tuple[Any, ...]]:
    owner = probed.describe_owner()
    own_widths = {n * m for e in owner if e[0] == "attribute" for n in e[1][-2:] for m in (1, 2)}
    head_dims = sorted(n for n in own_widths if n % 2 == 0 and n > 2) if own_widths else [_HEAD_DIM]
    others = [_other_values(probed.names[i]) for i in sorted(rest)]
    for rank, head_dim, forms, values in itertools.product(
        (4, 3, 2), head_dims, _table_forms(len(tables)), [*itertools.product(*others)]
    ):
        entries = [describe(default, False) for default in probed.defaults]
        for i in probed.data:
            entries[i] = ("data", rank, torch.float32, head_dim)
        for places, each in ((tables, forms), (rest, values)):
            for i, entry in zip(sorted(places), each, strict=True):
                entries[i] = entry
        yield (*entries, *owner)


def _table_forms(count: int) -> list[tuple[Any, ...]]:
    real, width = torch.float32, _HEAD_DIM
    if count != 1:
        return [(("table", n, real, w),) * count for n in (3, 2, 4) for w in (width, width // 2)] if count else [()]
    forms: list[Any] = []
    for n in (3, 2, 4):
        forms += [("tuple", *[("table", n, real, w)] * 2) for w in (width, width // 2)]
        forms += [("table", n, torch.complex64, width // 2)]
        forms += [("table", n + 2, real, width // 2, 2, 2), ("table", n + 1, real, width // 2, 2)]
        forms += [("table", n, real, w) for w in (width, 2 * width, width // 2)]
    by_axis = ("tuple", *[("tuple", *[("table", 2, real, width // 3)] * 2)] * 3)
    return [(form,) for form in (*forms, by_axis)]


def _other_values(name: str) -> list[Any]:
    if "section" in name:
        return [("list", 3, 4, 5), ("list", 3, 3, 3, 3)]
    if "dim" in name:
        return [1, 2, -1, -2]
    if _OFFSETS.search(name):
        return [0, ("integers", 1, torch.int64)]
    ids, coordinates = [("integers", n, torch.int64) for n in (2, 1)], ("integers", 3, torch.int64, 2)
    return [*ids, coordinates, ("tuple", *ids[:1] * 3)] if _PLACES.search(name) else [None]


def _replace(function: Callable[..., Any], probed: _Probed, impl: Impl) -> Callable[..., Any]:
    module = probed.owner if isinstance(probed.owner, nn.Module) else None
    recipes: dict[Any, PreparedCall | None] = {}

    def replacement(*args: Any, **kwargs: Any) -> Any:
        values = probed.bind(args, kwargs)
        if values is None or (module is not None and not is_plain_module(module)):
            return function(*args, **kwargs)
        sizes, xs, leaves = probed.measure(values)
        if torch.compiler.is_compiling():
            recipe = probed.resolve(values, xs, leaves)
        else:
            try:
                recipe = recipes[sizes]
            except KeyError:  # a single look-up, because another thread may clear the cache
                if len(recipes) >= _MOST_RECIPES:
                    recipes.clear()
                recipe = recipes[sizes] = probed.resolve(values, xs, leaves)
        if recipe is None or not (recipe.plan.ignores_autocast or not torch.is_autocast_enabled(xs[0].device.type)):
            return function(*args, **kwargs)
        out = run_prepared(recipe, xs, leaves, impl)
        return function(*args, **kwargs) if out is None else out

    functools.update_wrapper(replacement, get_forward(function), updated=())
    replacement.original, replacement.probed = function, probed  # pyright: ignore[reportFunctionMemberAccess]
    return replacement
