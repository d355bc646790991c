# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

"""Asserts as tests of untrusted code: split into calls of the code, and a condition that another process checks."""

import ast
import builtins
import dataclasses
from collections.abc import Sequence


class CodeTestsError(ValueError):
    """The tests of a task are invalid; the message names them and the remedy."""


@dataclasses.dataclass(frozen=True)
class SplitAssert:
    """An assert statement split into two parts, for two processes."""

    expressions: tuple[str, ...]
    """Calls of the tested functions, with their arguments but without expected results."""
    condition: str
    """Condition to check, with `_0`, `_1`, … for the values of the expressions."""


_MODULES = ("cmath", "collections", "itertools", "math", "re")
_TRUSTED = frozenset({*dir(builtins), *_MODULES, "Counter"})
"""Names that the process without code of the model evaluates."""
_LIBRARIES = frozenset(
    {"np", "numpy", "pd", "pytest", "scipy", "torch", "datetime", "decimal", "fractions", "functools", "heapq", "json"}
    | {"operator", "statistics", "string", "Decimal", "Fraction", "OrderedDict", "allclose", "approx", "date"}
    | {"defaultdict", "deque", "isclose", "sqrt", "timedelta"}
)
"""Names that only the tested code could evaluate, and replace by functions that accept or return every value."""
_PREDICATES = frozenset(
    {"startswith", "endswith", "is_integer", "equals", "__contains__", "__eq__"}
    | {name for kind in (str, set) for name in dir(kind) if name.startswith("is")}
)
"""Methods, such as `isdigit`, that an object of the tested code could replace by ones that accept every value."""
_PLAIN_TYPES = frozenset(
    {"bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "set", "str", "tuple", "type"}
)
"""Types of reported values, and `type` for `type(None)`."""
_FUNCTION_PLACES = {"map": (0, _TRUSTED), "filter": (0, _TRUSTED), "isinstance": (1, _PLAIN_TYPES)}
"""By builtin: the position of the argument that is a function or type, and the names allowed for it."""
_BINDS_NAMES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda, ast.NamedExpr)


def split_assert(line: str) -> SplitAssert:
    """Split an assert statement into calls of the tested code and a condition on their values.

    Raises:
        CodeTestsError: if it is not an assert statement, is always true, does not use the tested code, binds names
            around its calls, calls a library or a method that the tested code could replace, or passes one of its
            functions to a builtin.

    >>> split_assert("assert abs(area(2) - 12.566) < 0.01")
    SplitAssert(expressions=('area(2)',), condition='abs(_0 - 12.566) < 0.01')
    """
    try:
        body = ast.parse(line).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CodeTestsError(f"the test {line[:200]!r} is not valid Python: {error}") from error
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise CodeTestsError(f"the test {line[:200]!r} is not one assert statement; write `assert f(1) == 2`")
    if isinstance(body[0].test, ast.Tuple):
        raise CodeTestsError(f"the test {line[:200]!r} asserts a tuple, which is always true; remove the parentheses")
    splitter = _Splitter()
    condition = splitter.visit(body[0].test)
    if any(isinstance(node, _BINDS_NAMES) for node in ast.walk(condition)):
        raise CodeTestsError(
            f"the test {line[:200]!r} binds names, so it cannot be checked outside the tested code's process; write "
            "each call as a separate assert"
        )
    if not splitter.expressions:
        raise CodeTestsError(
            f"the test {line[:200]!r} does not use the tested code; call one of its functions, as `solution.NAME` if "
            "it has the name of a builtin"
        )
    return SplitAssert(tuple(splitter.expressions), ast.unparse(condition))


class _Splitter(ast.NodeTransformer):
    """Replaces the outermost calls and names that are not builtins, which the tested code has to evaluate."""

    def __init__(self) -> None:
        self.expressions: list[str] = []

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Name | ast.Call | ast.Attribute | ast.Subscript) and _root(node) not in _TRUSTED:
            _check_replaceable(node)
            self.expressions.append(ast.unparse(node))
            return ast.Name(f"_{len(self.expressions) - 1}", ast.Load())
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            _check_passed(node, node.func.id)
        return self.generic_visit(node)


def _check_replaceable(node: ast.expr) -> None:
    """Refuse calls that the tested code evaluates, and could replace to pass."""
    name = _root(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PREDICATES:
        name = node.func.attr
    if name in _LIBRARIES or name in _PREDICATES:
        hint = f"; if the code defines it, write `solution.{name}`" if name == _root(node) else ""
        raise CodeTestsError(
            f"the test {ast.unparse(node)[:200]!r} calls {name!r}, which the tested code could replace; write it with "
            f"comparisons, builtins and the modules {', '.join(_MODULES)}{hint}"
        )


def _check_passed(call: ast.Call, name: str) -> None:
    """Refuse functions of the tested code, and types that values lose, as arguments of a builtin."""
    place, known = _FUNCTION_PLACES.get(name, (len(call.args), _TRUSTED))
    passed = [*call.args[place : place + 1], *(keyword.value for keyword in call.keywords if keyword.arg == "key")]
    for function in passed:
        if any(isinstance(node, ast.Name) and node.id not in known for node in ast.walk(function)):
            raise CodeTestsError(
                f"the test {ast.unparse(call)[:200]!r} passes {ast.unparse(function)!r} to {name}, which runs in "
                "another process, without the tested code and with plain values such as lists; call it in separate "
                "asserts, or compare the values"
            )


def _root(node: ast.AST) -> str:
    """Return the name that an expression starts with, or a trusted name if it starts with none."""
    while not isinstance(node, ast.Name):
        match node:
            case ast.Call(func=inner) | ast.Attribute(value=inner) | ast.Subscript(value=inner):
                node = inner
            case _:
                return "None"
    return node.id


# Runs in the process of the model's code, which can inspect it, so it contains calls but no expected results. It
# reports only plain Python values, so that no object of the model takes part in the comparison: a `Counter` is reported
# as a dict, a named tuple as a tuple, a `Fraction` as an int or float, a dictionary's keys as a tuple.
_EVALUATE = """
import collections.abc, decimal, itertools, json, numbers, sys, types

def _literal(value, depth=0):
    if depth > 50:
        raise ValueError("nested too deeply")
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, int):
        # The number of hexadecimal digits is not limited.
        return hex(int.__add__(value, 0))
    if isinstance(value, float):
        if value != value:
            if depth == 0:
                return "nan"
            raise ValueError("NaN has no literal")
        # Python has no literal for infinity, but evaluates larger numbers to it.
        return float.__repr__(value).replace("inf", "1e999")
    if isinstance(value, bytearray):
        value = bytes(value)
    for base in (complex, str, bytes):
        if isinstance(value, base):
            return base.__repr__(value)
    if isinstance(value, dict):
        pairs = (_literal(key, depth + 1) + ": " + _literal(item, depth + 1) for key, item in dict.items(value))
        return "{" + "".join(pair + ", " for pair in pairs) + "}"
    if isinstance(value, (numbers.Rational, numbers.Real, decimal.Decimal)):
        whole = int(value)
        return _literal(whole if whole == value else float(value))
    if isinstance(value, set) and not value:
        return "set()"
    for bases, opening, closing in (
        ((list,), "[", "]"),
        ((set,), "{", "}"),
        ((frozenset,), "frozenset([", "])"),
        ((tuple, range, collections.deque, collections.abc.MappingView), "(", ")"),
    ):
        if isinstance(value, bases):
            return opening + "".join(_literal(item, depth + 1) + ", " for item in value) + closing
    raise TypeError(f"{type(value)} has no literal")

def _report(value):
    if not isinstance(value, collections.abc.Iterator):
        return _literal(value)
    items = list(itertools.islice(value, 1_000_001))
    if len(items) > 1_000_000:
        raise ValueError("the iterator is too long")
    return "iter " + _literal(items)

def _evaluate(code, expressions, token):
    # Dataclasses look up the module of their class.
    module = sys.modules["solution"] = types.ModuleType("solution")
    space = module.__dict__
    space["solution"] = module
    exec(compile(code, "solution.py", "exec"), space)
    answers = []
    for expression in expressions:
        try:
            answers.append(_report(eval(expression, space)))
        except (Exception, SystemExit):
            answers.append(None)
    print("\\n" + token + json.dumps(answers))
"""


def evaluation(code: str, expressions: Sequence[str], token: str) -> str:
    """Return the program that evaluates expressions with the tested code.

    Args:
        code: the tested code.
        expressions: the expressions.
        token: printed before the JSON list of their values as text, null for an expression without one.
    """
    return f"{_EVALUATE}\n_evaluate({code!r}, {list(expressions)!r}, {token!r})"


CHECK = """
import ast, cmath, collections, itertools, json, math, re, sys

MODULES = {module.__name__: module for module in (cmath, collections, itertools, math, re)}

def build(node):
    # As `ast.literal_eval`, which has no frozensets.
    match node:
        case ast.Call(ast.Name("frozenset"), [ast.List(items)], []):
            return frozenset(map(build, items))
        case ast.List(items):
            return list(map(build, items))
        case ast.Tuple(items):
            return tuple(map(build, items))
        case ast.Set(items):
            return set(map(build, items))
        case ast.Dict(keys, values):
            return dict(zip(map(build, keys), map(build, values)))
    return ast.literal_eval(node)

def parse(answer):
    if answer == "nan":
        return math.nan
    # An iterator is not equal to a list, but the condition can convert it to one.
    is_iterator = answer.startswith("iter ")
    text = answer.removeprefix("iter ")
    value = build(ast.parse(text, mode="eval").body) if "frozenset(" in text else ast.literal_eval(text)
    return iter(value) if is_iterator else value

def check(condition, answers):
    try:
        # A call without a value fails the test only if the condition uses it: `f(1) == 1 or f(0) == 0`.
        space = {f"_{index}": parse(answer) for index, answer in enumerate(answers) if answer is not None}
        return bool(eval(condition, MODULES | {"Counter": collections.Counter} | space))
    except Exception:
        return False

print(json.dumps([check(condition, answers) for condition, answers in json.loads(sys.stdin.read())]))
"""
"""Program that runs in a separate process without code of the model. It reads conditions with the answers to their
expressions from standard input, and prints whether each holds, both as JSON."""
