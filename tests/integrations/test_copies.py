"""Copies of functions that look up other functions in globals, modules, closures, imports and nested functions."""

import copy
import functools
import importlib
import io
import math
import sys
import types

import pytest
import torch
from torch import nn

from lrpe_md.integrations.copies import Copier, Recipe, find_methods, is_adapted, looks_rotary, read_own

SOURCE = """
import collections
import functools
import somebodys_rope as package
from . import other
from .other import turn_rope as renamed

def apply_rope(x):
    return ("stock", x)

def helper(x):
    return apply_rope(x)

def deep(x):
    return helper(x)

bound = functools.partial(apply_rope)
BY_DEVICE = {"gpu": apply_rope, "cpu": bound, "name": "cpu"}

class Lazy(dict):
    def items(self): raise AssertionError("imports all values")

class Registry(collections.UserDict): pass  # like the registry of attention functions in transformers

LAZY, REGISTRY = Lazy(gpu=apply_rope), Registry(gpu=apply_rope)

def by_global(x): return apply_rope(x)
def by_module(x): return other.turn_rope(x)
def by_module_of_a_package(x): return package.other.turn_rope(x)
def by_lazy_table(x): return LAZY["gpu"](x)
def by_registry(x): return REGISTRY["gpu"](x)
def by_renamed(x): return renamed(x)
def by_partial(x): return bound(x)
def by_table(x): return BY_DEVICE["gpu"](x)
def by_table_with_default(x): return BY_DEVICE.get("tpu", BY_DEVICE["gpu"])(x)
def by_get_of_table(x): return BY_DEVICE.get("cpu")(x)
def by_helper(x): return helper(x)
def by_deep_helper(x): return deep(x)
def by_comprehension(x): return [apply_rope(each) for each in (x,)][0]
def by_lambda(x): return (lambda each: apply_rope(each))(x)

def by_import(x):
    from .other import turn_rope
    return turn_rope(x)

def by_inner(x):
    def rope(each):
        return ("stock", each)
    return rope(x)

def closure():
    function, module = apply_rope, other
    def by_cell(x): return function(x)
    def by_cell_of_a_module(x): return module.turn_rope(x)
    return by_cell, by_cell_of_a_module

by_cell, by_cell_of_a_module = closure()

def decorate(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs): return function(*args, **kwargs)
    return wrapper

@decorate
@decorate
def by_decorated(x): return apply_rope(x)

def nothing(x): return max(len(str(x)), 1)

class Attention:
    number = 1
    def forward(self, x): return self.turn(x), self.static_rope(x), self.of_class(x)
    def turn(self, x): return apply_rope(x)
    @staticmethod
    def static_rope(x): return ("stock", x)
    @classmethod
    def of_class(cls, x): return (cls.number, apply_rope(x))
    def unused(self, x): return apply_rope(x)
"""
OTHER = 'def turn_rope(x):\n    return ("stock", x)\n'
WAYS = [
    "by_global", "by_module", "by_renamed", "by_partial", "by_helper", "by_deep_helper", "by_comprehension",
    "by_lambda", "by_import", "by_inner", "by_cell", "by_cell_of_a_module", "by_decorated", "by_table",
    "by_table_with_default", "by_get_of_table", "by_module_of_a_package", "by_registry",
]  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copies")
    package = folder / "somebodys_rope"
    package.mkdir()
    for name, text in (("__init__", ""), ("other", OTHER), ("attention", SOURCE)):
        (package / f"{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("somebodys_rope.attention")
    sys.path.remove(str(folder))


@functools.cache
def ours_for(function):
    def ours(x):
        return "ours", x

    return ours


def exchange(function):
    """Replace functions whose names end in rope, and partials of such functions."""
    if isinstance(function, functools.partial):
        return exchange(function.func)
    return ours_for(function) if function.__name__.endswith("rope") else None


@pytest.mark.parametrize("name", WAYS)
def test_each_way_to_look_up_a_function(library, name):
    function = getattr(library, name)
    before = dict(vars(library))
    made = Copier(exchange).copy(function)
    assert made(1) == ("ours", 1)
    assert function(1) == ("stock", 1)
    assert {key: vars(library)[key] for key in before} == before
    assert (made.__name__, made.__qualname__, made.__module__) == (name, function.__qualname__, function.__module__)
    assert Copier(exchange).copy(function) is made
    copied = Copier(exchange).copy(made)
    assert copied is None or copied(1) == ("ours", 1)


def test_what_is_patched_later_reaches_the_copy(library, monkeypatch):
    made = Copier(exchange).copy(library.by_global)
    code = "def f(x):\n    return scale * apply_rope(x)[1]\n"
    exec(code, vars(library))
    made = Copier(exchange).copy(library.f)
    library.scale = 2
    assert made(3) == 6
    library.scale = 3
    assert made(3) == 9


def test_a_lazy_table_is_not_read(library):
    assert Copier(exchange).copy(library.by_lazy_table) is None


def test_a_function_without_any_is_not_copied(library):
    assert Copier(exchange).copy(library.nothing) is None


def test_a_name_that_is_an_attribute_of_something_else_is_left(library):
    exec("def both(x, y):\n    return apply_rope(x), y.apply_rope\n", vars(library))
    assert Copier(exchange).copy(library.both) is None


def test_other_packages_helpers_are_left(library):
    exec("def by_stranger(x, stranger):\n    return stranger_helper(x)\n", vars(library))
    stranger = types.ModuleType("stranger")
    exec("def apply_rope(x): return 'stock', x\ndef stranger_helper(x): return apply_rope(x)", vars(stranger))
    library.stranger_helper = stranger.stranger_helper
    assert Copier(exchange).copy(library.by_stranger) is None


class Exchange:
    """An exchange that can be pickled, as a recipe requires."""

    def __call__(self, function):
        return exchange(function)

    def refine(self, method, copied):
        return copied, {}

    def __eq__(self, other):
        return isinstance(other, Exchange)

    def __hash__(self):
        return 1


def test_a_class(library):
    cls = library.Attention
    recipe = Recipe(Exchange(), ("forward",))
    made = recipe.derive(cls)
    assert made is recipe.derive(cls)
    assert made is not cls
    assert is_adapted(made)
    assert not is_adapted(cls)
    assert made.__name__ == "Attention"
    assert issubclass(made, cls)
    assert made().forward(1) == (("ours", 1), ("ours", 1), (1, ("ours", 1)))
    assert made.static_rope(1) == ("ours", 1)
    assert cls().forward(1) == (("stock", 1), ("stock", 1), (1, ("stock", 1)))
    assert made.unused is cls.unused
    assert set(find_methods(cls, ("forward",))) == {"forward", "turn", "static_rope", "of_class"}
    assert recipe.derive(dict) is dict


def test_copies_and_files_of_its_objects(library):
    part = Recipe(Exchange(), ("forward",)).derive(library.Attention)()
    part.weight = torch.ones(2)
    file = io.BytesIO()
    torch.save(part, file)
    file.seek(0)
    for other in (copy.copy(part), copy.deepcopy(part), torch.load(file, weights_only=False)):
        assert type(other) is type(part)
        assert torch.equal(other.weight, part.weight)
        assert other.forward(1) == part.forward(1)


def test_what_a_method_looks_up_in_its_object():
    class Part(nn.Module):
        def forward(self, x):
            later = lambda: self.inner.rope.turn  # noqa: E731
            return later, self.scale, math.pi, [self.items for _ in x]

    assert read_own(Part.forward) == {
        ("inner",), ("inner", "rope"), ("inner", "rope", "turn"), ("scale",), ("items",),
    }  # fmt: skip


def test_names_that_rotary_functions_have():
    def apply_rotary_pos_emb(q, k): ...
    def turn(x, freqs_cis): ...
    def process(tensor, scope, cosmos): ...
    def forward(self, image_rotary_emb): ...

    found = [looks_rotary(f.__code__) for f in (apply_rotary_pos_emb, turn, process, forward)]
    assert found == [True, True, False, False]


def test_compiled(library):
    """A copy causes no graph break, and follows changes of the functions that it looks up."""
    exec("import torch\ndef turn_all(x):\n    return torch.sin(scale_rope(x))\n", vars(library))
    exec("def scale_rope(x):\n    return x\n", vars(library))
    torch._dynamo.reset()
    made = Copier(lambda f: (lambda x: 2 * x) if f.__name__ == "scale_rope" else None).copy(library.turn_all)
    compiled, x = torch.compile(made, backend="eager", fullgraph=True), torch.randn(3)
    torch.testing.assert_close(compiled(x), torch.sin(2 * x))
