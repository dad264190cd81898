"""Names, parameters and the presence of defaults in the type stub of the extension, against the extension."""

from __future__ import annotations

import ast
import pathlib
import re

from moesaic import _core


def parse(text):
    """Parse a function's signature, as nanobind writes it."""
    # The options of an array are no Python (ndarray[device='cpu']), and defaults are numbers of values (\0).
    text = re.sub(r"\\\d+", "...", re.sub(r"ndarray\[[^]]*\]", "ndarray", text))
    (function,) = ast.parse(text + ": ...").body
    return function


def names(function):
    return [x.arg for x in function.args.posonlyargs + function.args.args + function.args.kwonlyargs]


def defaults(function):
    """Presence of a default of each parameter."""
    args = function.args
    positional = len(args.posonlyargs + args.args)
    return [i >= positional - len(args.defaults) for i in range(positional)] + [x is not None for x in args.kw_defaults]


def compare(body, runtime, scope):
    described = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert set(described) == {name for name in runtime if not name.startswith("_")}, scope
    for name, node in described.items():
        value = runtime[name]
        if isinstance(node, ast.ClassDef):
            compare(node.body, vars(value), f"{scope}.{name}")
        elif isinstance(value, property):
            assert [x.id for x in node.decorator_list] == ["property"], f"{scope}.{name}"
        else:
            assert len(value.__nb_signature__) == 1, f"{scope}.{name} has overloads"
            signature = value.__nb_signature__[0][0]
            found = parse(signature)
            assert defaults(found) == defaults(node), f"{scope}.{name}: {signature}"
            if not signature.split(" -> ")[0].endswith("/)"):  # parameters can be given by name
                assert names(found) == names(node), f"{scope}.{name}: {signature}"


def test_the_stub_has_the_names_and_parameters_of_the_extension():
    stub = pathlib.Path(_core.__file__).with_name("_core.pyi")
    compare(ast.parse(stub.read_text()).body, vars(_core), "_core")
