"""A Jinja sandbox whose templates can't work for ever: what they do is counted, and too much is refused.

A template is foreign code, and a thread that runs it can't be stopped from outside. So it stops itself. Each
turn of a loop, each call, filter, operator and piece of output costs a step of the render's budget, and one
more for every so many characters or items that go in or come out. What a single operation could make longer
than any prompt is refused before it is made. The clock is the second bound, for work that steps underrate.

How loops are met: jinja2 compiles `for` to Python's, past every hook of the sandbox, so the syntax tree is
changed first; what is iterated goes through a filter whose name no template can write.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeVar, cast

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

Node = TypeVar("Node", bound=nodes.Node)

MAX_STEPS = 1 << 22
"""Of one render. The longest conversations take some ten thousand, a step some 0.3 us."""

MAX_SECONDS = 10.0
"""Of one render, on however busy a machine."""

MAX_LENGTH = 1 << 22
"""Characters or items of any value: as many as a prompt may have."""

MAX_INTEGER_BITS = 1 << 14
"""Of what a power or a product of integers makes."""

CHARACTERS_A_STEP = 64
ITEMS_A_STEP = 8
_LOOKS_AT_CLOCK = 1 << 10
"""Steps between two."""

_TURNS, _WRITTEN = "\0turns", "\0written"
_BUDGET = "\0budget"
_WIDE = re.compile(r"%(?:\([^)]*\))?[-+ #0-9.]*(?:\*|[0-9]{7})|\{[^{}]*:[^{}]*(?:[0-9]{7}|\{)")
"""A width or precision that nobody needs, or that comes from an argument, of `%` or of `str.format`."""

MAX_DIGITS = 400
"""To which a number is rounded; there are no more in a float."""

_WITHOUT_A_LOOK = frozenset({"count", "d", "default", "first", "items", "last", "length"})
"""Filters that meet no item of what they are given."""

MAX_INDENT = 64
"""Of JSON."""


class TemplateTooLong(Exception):
    """A template does more than a prompt can need."""


class Budget:
    """Of one render. clock: seconds, of no date."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = MAX_STEPS
        self._next_look = MAX_STEPS - _LOOKS_AT_CLOCK
        self._deadline = clock() + MAX_SECONDS

    @property
    def num_steps(self) -> int:
        """That were spent."""
        return MAX_STEPS - self._left

    def spend(self, num_steps: int) -> None:
        """Raises TemplateTooLong where there are no more."""
        self._left -= num_steps
        if self._left < 0:
            raise TemplateTooLong(f"it takes over {MAX_STEPS} steps")
        if self._left < self._next_look:
            self._next_look = self._left - _LOOKS_AT_CLOCK
            if self._clock() > self._deadline:
                raise TemplateTooLong(f"it takes over {MAX_SECONDS:g} s")

    def meet(self, value: object) -> None:
        """A value goes into an operation, or comes out of it."""
        if isinstance(value, str):
            length = len(value)
            self.spend(length // CHARACTERS_A_STEP)
        elif isinstance(value, Sequence | Mapping | Set):
            length = len(value)
            self.spend(length // ITEMS_A_STEP)
        else:
            return
        if length > MAX_LENGTH:
            raise TemplateTooLong(f"it makes a value longer than {MAX_LENGTH}")

    def turns(self, items: Iterable[Any], num_characters: int = 0) -> Iterator[Any]:
        """Each turn of a loop over them, whose body has so many characters of text."""
        cost = 1 + num_characters // CHARACTERS_A_STEP
        for item in items:
            self.spend(cost)
            yield item

    def pieces(self, items: Iterable[Any], separator: object) -> Iterator[Any]:
        """What is joined to one text, a piece after the other."""
        room = MAX_LENGTH
        for item in items:
            self.spend(1)
            self.meet(item)
            room -= _length(item) + _length(separator)
            if room < 0:
                raise TemplateTooLong(f"it makes a value longer than {MAX_LENGTH}")
            yield item


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """Renders of its templates are given their budget among the variables, by `with_budget`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_finalize, **options)
        del self.globals["lipsum"]  # writes as long as it is told to
        self.filters = {name: _budgeted(name, filter_) for name, filter_ in self.filters.items()}
        self.filters[_TURNS] = _turns
        self.filters[_WRITTEN] = _written

    def add_filter(self, name: str, filter_: Callable[..., Any]) -> None:
        """One of one's own, budgeted as those of jinja2 are."""
        self.filters[name] = _budgeted(name, filter_)

    def compile_budgeted(self, source: str) -> jinja2.Template:
        """Raises jinja2.TemplateError."""
        tree = _Counting().visit(self.parse(source))
        return self.from_string(cast(nodes.Template, tree))

    # Named as jinja2 names them, so that no keyword of a template collides.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - see above
        budget = _budget_of(__context)
        budget.spend(1)
        for argument in (*args, *kwargs.values()):
            budget.meet(argument)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps format
        if isinstance(owner, str):
            _check_arguments(__obj.__name__, owner, (*args, *kwargs.values()))
            if __obj.__name__ == "join" and args:
                args = (budget.pieces(args[0], owner), *args[1:])
        made = super().call(__context, __obj, *args, **kwargs)
        budget.meet(made)
        return made

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget_of(context)
        budget.spend(1)
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        made = super().call_binop(context, operator, left, right)
        budget.meet(made)
        return made


def with_budget(values: Mapping[str, Any], budget: Budget) -> dict[str, Any]:
    """The variables of one render."""
    return {**values, _BUDGET: budget}


class _Counting(NodeTransformer):
    """Sends what loops iterate, and what `~` makes, through filters that count."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - named by the node
        node = cast(nodes.For, self.generic_visit(node))
        num_characters = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.iter = _filtered(
            cast(nodes.Expr, node.iter), _TURNS, nodes.Const(num_characters, lineno=node.lineno)
        )
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802 - likewise
        return _filtered(cast(nodes.Concat, self.generic_visit(node)), _WRITTEN)


def _filtered(value: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


def _budget_of(context: Context) -> Budget:
    return cast(Budget, context.parent[_BUDGET])


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Of each value that is written."""
    _budget_of(context).spend(1)
    _budget_of(context).meet(value)
    return value


@jinja2.pass_context
def _turns(context: Context, items: Iterable[Any], num_characters: int) -> Iterator[Any]:
    return _budget_of(context).turns(items, num_characters)


@jinja2.pass_context
def _written(context: Context, text: str) -> str:
    _budget_of(context).spend(1)
    _budget_of(context).meet(text)
    return text


def _budgeted(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for what it is given and for what it makes; what it makes bit by bit is paid so."""
    wanted = getattr(filter_, "jinja_pass_arg", None)

    @functools.wraps(filter_)
    def budgeted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget_of(context)
        budget.spend(1)
        if name not in _WITHOUT_A_LOOK:
            budget.meet(value)
            budget.spend(0 if isinstance(value, str) else _length(value))
        _check_arguments(name, value, (*args, *kwargs.values()))
        if name == "join":
            value = budget.pieces(value, args[0] if args else kwargs.get("d", ""))
        given = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        first = () if wanted is None else (given[wanted.name],)
        made = filter_(*first, value, *args, **kwargs)
        if isinstance(made, Iterator):
            return budget.turns(made)
        budget.meet(made)
        return made

    return jinja2.pass_context(budgeted)


# --- what one operation could make too long -------------------------------------------------------


def _length(value: object) -> int:
    return len(value) if isinstance(value, Sequence | Mapping | Set) else 1


def _check_arguments(name: str, value: object, arguments: tuple[Any, ...]) -> None:
    """Of a filter on `value`, or of the method of a text by that name: numbers are widths and counts, and
    what is put in for a piece of a text may be put in often. Raises TemplateTooLong."""
    most = {"round": MAX_DIGITS, "tojson": MAX_INDENT}.get(name, MAX_LENGTH)
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > most:
            raise TemplateTooLong(f"{name} is given {argument}")
    if name in ("format", "format_map") and isinstance(value, str):
        _check_format(value)
    if name == "sum" and any(isinstance(argument, list | tuple) for argument in arguments):
        raise TemplateTooLong("sum is given a start that grows")
    if not isinstance(value, str):
        return
    if name == "replace" and len(arguments) > 1:
        old, new = arguments[:2]
        num_places = value.count(old) if isinstance(old, str) and old else len(value) + 1
        _check_made(num_places, _length(new))
    elif name in ("indent", "expandtabs", "wordwrap", "translate"):
        widths = [arg if isinstance(arg, int) else _length(arg) for arg in arguments]
        num_places = value.count("\t" if name == "expandtabs" else "\n") + 1
        if name in ("wordwrap", "translate"):
            num_places, widths = len(value), [_length(arg) for arg in arguments if not isinstance(arg, int)]
        _check_made(num_places, max(widths, default=0))


def _check_made(num_places: int, length: int) -> None:
    if num_places * length > MAX_LENGTH:
        raise TemplateTooLong(f"it makes a value longer than {MAX_LENGTH}")


def _check_product(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
            raise TemplateTooLong("it makes too large a number")
        return
    for times, value in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(value, Sequence):
            _check_made(times, len(value))


def _check_power(base: Any, exponent: Any) -> None:
    is_whole = isinstance(base, int) and isinstance(exponent, int)
    if is_whole and base.bit_length() * abs(exponent) > MAX_INTEGER_BITS:
        raise TemplateTooLong("it makes too large a number")


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise TemplateTooLong("a format asks for too wide a field")
