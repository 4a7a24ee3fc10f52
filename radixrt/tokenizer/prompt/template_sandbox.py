"""Bounds the time and the memory of a chat template, which comes with a checkpoint and may be
hostile.

Jinja's sandbox, which transformers uses, keeps a template away from Python's internals and bounds
neither time nor memory: nested loops, a macro that calls itself twice, ``"a" * 10**9``, or ``x ~ x``
in a loop stop a process. This one counts steps of loops, calls, and the characters and items of the
values. Operations whose result could be large are refused before they run.
"""

import contextlib
import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateError
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

log = logging.getLogger(__name__)

MAX_SECONDS = 2.0
"""Longest rendering. One of 10,000 messages takes some 50 ms."""

MAX_MADE = 256 << 20
"""Characters and items of all values that one rendering makes, ..."""
MAX_VALUE = 32 << 20
"""... and of one of them. A request's body is at most as large."""

MAX_INT_BITS = 4096
MAX_DEPTH = 200
MAX_WIDTH = 1000
"""Greatest width of a field that a template formats, or of an indentation."""

_LOOK_EVERY = 16
"""Counted operations between two looks at the clock."""

_LOOP_STEPS = "_counted"
"""Name of the filter that counts the steps of loops."""

_REMOVED_FILTERS = ("pprint", "urlize", "wordwrap", "xmlattr")
"""Slow, and of no use in a prompt."""

_UNSAFE_METHODS = {"expandtabs", "translate"}
_WIDTHS = {"batch", "center", "indent", "ljust", "rjust", "slice", "to_bytes", "tojson", "zfill"}
"""Filters and methods whose arguments are widths."""
_LIST_FILTERS = {
    "attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list", "map",
    "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort", "sum", "unique",
}  # fmt: skip
"""They do not make a text of a list."""
_CONTAINERS = (list, tuple, dict)

_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(?:\d{4,}|\*)|\{[^{}]*:[^{}]*(?:\d{4,}|\{)")
"""A field of a format string with a width of four digits, or one that an argument gives."""


class TemplateTooExpensiveError(TemplateError):
    """A template takes too much time or memory."""


class Budget:
    """What one rendering may still use."""

    def __init__(self) -> None:
        self._left = MAX_MADE
        self._until = time.monotonic() + MAX_SECONDS
        self._uses = 0

    def use(self, size: int) -> None:
        """Raises TemplateTooExpensiveError: that is too much."""
        self._uses += 1
        self._left -= size + 1
        if size > MAX_VALUE or self._left < 0:
            raise TemplateTooExpensiveError("it makes too large a text or list")
        if self._uses % _LOOK_EVERY == 0 and time.monotonic() > self._until:
            raise TemplateTooExpensiveError(f"it takes more than {MAX_SECONDS:g} s")


_current = threading.local()


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Bound the rendering in this block."""
    _current.budget = Budget()
    try:
        yield
    finally:
        _current.budget = None


def install() -> None:
    """Let transformers compile templates for this sandbox. Without :func:`bounded` they render as
    before."""
    from transformers.utils import chat_template_utils

    if chat_template_utils.ImmutableSandboxedEnvironment is BoundedSandbox:
        return
    chat_template_utils.ImmutableSandboxedEnvironment = BoundedSandbox  # type: ignore[misc]
    chat_template_utils._compile_jinja_template.cache_clear()
    if not isinstance(chat_template_utils._compile_jinja_template("").environment, BoundedSandbox):
        log.warning(
            "This version of transformers renders chat templates without limits of time and memory."
        )


def check_syntax(template: str) -> None:
    """Compile a template without transformers, whose import takes half a second, and so without its
    tag ``generation``.

    Raises:
        TemplateSyntaxError: the template is not valid, or uses that tag.
    """
    BoundedSandbox(extensions=["jinja2.ext.loopcontrols"]).from_string(template)


def _use(size: int) -> None:
    budget = getattr(_current, "budget", None)
    if budget is not None:
        budget.use(size)


def _made(value: Any) -> Any:
    """Count a value with all that is in it, and return it."""
    _use(_deep_size(value) if isinstance(value, _CONTAINERS) else _length(value))
    return value


def _counted(iterable: Iterable[Any], weight: int = 0) -> Iterator[Any]:
    """Count the steps of a loop, each of which writes ``weight`` characters without an
    expression."""
    for item in iterable:
        _use(weight)
        yield item


class _Generator(CodeGenerator):
    """Lets the sandbox see the values that expressions make without a call."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenated((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._counted(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._counted(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        by = "made" if node.ctx == "load" else ""
        self._counted(super().visit_Tuple, node, frame, by)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        by = "sliced" if isinstance(node.arg, nodes.Slice) else ""
        self._counted(super().visit_Getitem, node, frame, by)

    def _counted(
        self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame, by: str = "made"
    ) -> None:
        if not by:
            return visit(node, frame)
        self.write(f"environment.{by}(")
        visit(node, frame)
        self.write(")")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with counted loops, calls and values."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.finalize = _made
        self.filters[_LOOP_STEPS] = _counted
        self._literal_size = 0
        self.globals.pop("lipsum", None)  # nonsense of any length, slow to make

    # ------------------------------------------------------------ compiling

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> Any:
        for name in _REMOVED_FILTERS:
            self.filters.pop(name, None)
        for name, function in self.filters.items():
            if name != _LOOP_STEPS and not hasattr(function, "is_bounded"):
                self.filters[name] = _bounded_filter(name, function)
        return super().from_string(source, *args, **kwargs)

    def _parse(self, *args: Any, **kwargs: Any) -> nodes.Template:
        tree = super()._parse(*args, **kwargs)
        self._literal_size = max(self._literal_size, _literal_size(tree))
        for loop in list(tree.find_all(nodes.For)):
            weight = nodes.Const(_literal_size(loop))
            loop.iter = nodes.Filter(loop.iter, _LOOP_STEPS, [weight], [], None, None, lineno=loop.lineno)  # fmt: skip
            loop.iter.set_environment(self)
        return tree

    # ------------------------------------------------------------ running

    made = staticmethod(_made)

    @staticmethod
    def sliced(value: Any) -> Any:
        """Count the value of ``a[1:]``."""
        _use(_length(value))
        return value

    def concatenated(self, parts: tuple[Any, ...]) -> str:
        """The value of ``a ~ b``."""
        texts = [str(_made(part)) for part in parts]
        _use(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, (str, bytes)):
            _check_format(left, right)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _use(len(left) + len(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            product = bits + right.bit_length() if operator == "*" else 0
            if max(product, bits * right if operator == "**" else 0) > MAX_INT_BITS:
                raise TemplateTooExpensiveError("it computes with too large numbers")
        elif operator == "*":
            for sized, count in ((left, right), (right, left)):
                if isinstance(sized, Sized) and isinstance(count, int):
                    _use(len(sized) * max(0, count))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(__obj, LoopContext):  # of a recursive loop
            args = (_counted(args[0], __self._literal_size), *args[1:])
        elif isinstance(__obj, (BuiltinMethodType, MethodType)) or hasattr(__obj, "__wrapped__"):
            _check_method(__obj, args)
        _use(__self._literal_size)
        return _made(super().call(__context, __obj, *args, **kwargs))


def _literal_size(node: nodes.Node) -> int:
    """Characters that a node writes without an expression."""
    return sum(len(data.data) for data in node.find_all(nodes.TemplateData))


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    takes_context = hasattr(function, "jinja_pass_arg")

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        context, given = args[:takes_context], list(args[takes_context:])
        if given and isinstance(given[0], Iterator):
            given[0] = _counted(given[0])
        if name in ("join", "sum") and given:
            given[0] = list(given[0])
        if given and name not in _LIST_FILTERS:
            _made(given[0])
        if given:
            _check(name, given[0], [*given[1:], *kwargs.values()])
        result = function(*context, *given, **kwargs)
        _use(_length(result))
        return result

    run.is_bounded = True  # type: ignore[attr-defined]
    return run


def _check_method(method: Any, args: tuple[Any, ...]) -> None:
    """Refuse a method of a text whose result could be large."""
    name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
    if owner is None:  # Jinja's own form of str.format
        owner = getattr(getattr(method, "__wrapped__", None), "__self__", None)
    if not isinstance(owner, (str, bytes, int)):
        return
    if name in _UNSAFE_METHODS:
        raise TemplateTooExpensiveError(f"it calls {name}")
    if name == "join" and args:
        items = args[0] if isinstance(args[0], (*_CONTAINERS, str)) else []
        _check(name, items, [owner])
    else:
        _check(name, owner, args)


def _check(name: str, value: Any, args: Sequence[Any]) -> None:
    """Refuse a filter or method of a value whose result could be large."""
    if name in _WIDTHS:
        for width in args:
            if isinstance(width, int) and width > MAX_WIDTH:
                raise TemplateTooExpensiveError(f"it asks for a width of {width}")
    if name == "tojson":
        _use(_deep_size(value) * (MAX_WIDTH if args else 1))
    elif name == "indent":
        _use(str(value).count("\n") * MAX_WIDTH)
    elif name in ("format", "format_map"):
        _check_format(value, args)
    elif name == "replace" and len(args) >= 2:
        text, old, new = str(value), str(args[0]), str(args[1])
        _use(len(text) + text.count(old) * len(new))
    elif name == "join":
        between = len(str(args[0])) if args else 0
        _use(sum(between + _length(item) for item in value))
    elif name == "sum":
        _use(sum(map(_length, value)) * len(value))


def _check_format(template: Any, args: Any) -> None:
    text = template.decode("latin-1") if isinstance(template, bytes) else str(template)
    if _WIDE_FIELD.search(text):
        raise TemplateTooExpensiveError(f"it asks for a width of more than {MAX_WIDTH}")
    fields = text.count("%") + text.count("{")
    _use(len(text) + fields * (MAX_WIDTH + _deep_size(args)))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, *_CONTAINERS)) else 8


def _deep_size(value: Any, depth: int = 0) -> int:
    """Characters of a value's strings, and items of its containers; what is in it twice counts
    twice."""
    if not isinstance(value, _CONTAINERS):
        return _length(value)
    if depth > MAX_DEPTH:
        raise TemplateTooExpensiveError("it nests values too deeply")
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    size = 0
    for part in parts:
        _use(0)
        size += 1 + _deep_size(part, depth + 1)
    return size
