"""Templates that would work for ever are given up, by steps that are counted; ordinary ones cost few."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pageturner.service.engine import chat_template, template_budget
from pageturner.service.engine.chat_template import ChatTemplate
from pageturner.service.engine.template_budget import MAX_SECONDS, MAX_STEPS, Budget, TemplateTooLong
from pageturner.service.errors import InvalidArgument

FAMILIES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
LONG = "{% set s = 'x' * 4000000 %}"

ENDLESS = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that knows its place": "{% for i in range(99999) %}{{ loop.last }}{% endfor %}",
    "a loop over its own loops": "{% for i in [range(99999)] recursive %}"
    "{% if i is iterable %}{{ loop(i) }}{% endif %}{% endfor %}",
    "calls of calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "text set aside": "{% set x %}{% for i in range(99999) %}" + "y" * 9999 + "{% endfor %}{% endset %}",
    "filters over items": "{{ range(99999) | map('string') | map('length') | sum }}",
    "filters that select": "{{ range(99999) | select('odd') | list | length }}",
    "sorting": "{% for i in range(9) %}{{ range(9999) | sort | length }}{% endfor %}",
    "slices": "{{ [1] | slice(99999) | list }}",
    "a joined generator": "{{ range(99999) | map('string') | join }}",
}
"""Much more than 20,000 steps."""

HUGE = {
    "a text times a number": "{{ 'x' * 10**9 }}",
    "a number times a list": "{{ 10**9 * [1] }}",
    "a power": "{{ 10 ** (10 ** 8) }}",
    "a product of powers": "{{ (10 ** 4000) * (10 ** 4000) }}",
    "doubled by ~": LONG + "{% set s = s ~ s %}{{ s | length }}",
    "doubled by +": LONG + "{% set s = s + s %}{{ s | length }}",
    "a method's width": "{{ 'x'.center(10**9) }}",
    "a filter's width": "{{ 'x' | center(10**9) }}",
    "a named width": "{{ 'x' | center(width=10**9) }}",
    "a format": "{{ '%999999999d' % 1 }}",
    "a format's argument": "{{ '%*d' % (99, 1) }}",
    "a format by braces": "{{ '{:>999999999}'.format(1) }}",
    "braces in braces": "{{ '{:>{}}'.format(1, 10**6) }}",
    "a format filter": "{{ '%999999999d' | format(1) }}",
    "a replaced letter": LONG + "{{ s | replace('x', 'yy') | length }}",
    "nothing replaced": "{{ ('x' * 9999).replace('', 'y' * 999) }}",
    "a text many times": LONG + "{{ ([s] * 9) | join }}",
    "a text between letters": "{{ ('y' * 9999).join('x' * 9999) }}",
    "an indent": "{{ ('x\n' * 9999) | indent(9999) }}",
    "tabs": "{{ ('\t' * 9999).expandtabs(9999) }}",
    "digits": "{{ 1.5 | round(999999) }}",
    "lists in a sum": "{{ ([[1]] * 9999) | sum(start=[]) }}",
    "indented JSON": "{{ [1] | tojson(indent=999999) }}",
}

HARMLESS = {
    "{{ messages | map(attribute='content') | join(', ') }}": "a, b",
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}": (
        "1/2False 2/2True "
    ),
    "{% for m in messages if m.content != 'a' %}{{ m.content }}{% else %}none{% endfor %}": "b",
    "{% for k, v in {'x': 1}.items() %}{{ k ~ '=' ~ v }}{% break %}{% endfor %}": "x=1",
    "{{ 'call 5551234567, **now**, 100%' + ' %s {}'.format(7) % 'x' }}": "call 5551234567, **now**, 100% x 7",
    "{{ '%05.1f|%-4s|' % (2.25, 'a') }}": "002.2|a   |",
    "{{ {'at': 1900000000} | tojson }}, {{ 1900000000 | string }}": '{"at": 1900000000}, 1900000000',
    "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = s.n + 1 %}{% endfor %}{{ s.n }}": "2",
    "{% macro f(x) %}[{{ caller() }}{{ x }}]{% endmacro %}{% call f(2) %}1{% endcall %}": "[12]",
    "{{ missing }}{% for x in missing %}{% endfor %}{{ missing | default('d') }}": "d",
    "{{ 2 ** 10 }} {{ 7 * 3 }} {{ 'ab' * 2 }} {{ 2 * [1] }} {{ 2 ** -1 }}": "1024 21 abab [1, 1] 0.5",
    "{% for i in [1, [2]] recursive %}{{ i if i is number else loop(i) }}{% endfor %}": "12",
}

AS_EVER = (
    "{% block a %}{{ messages|length }}{% for m in messages %}{{ m.content|upper }}{% endfor %}{% endblock %}"
    "{{ self.a() }}",
    "{% filter upper %}a{{ messages[0].content }}{% endfilter %}{% set x | trim %}  a {% endset %}[{{ x }}]",
    "{% set j = joiner(', ') %}{% for m in messages %}{{ j() }}{{ loop.cycle('o', 'e') }}"
    "{{ loop.changed(m.role) }}{{ loop.previtem is defined }}{% endfor %}",
    "{{ messages | map(attribute='content') | select('equalto', 'a') | list }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | tojson }}",
    "{{ messages | groupby('role') | length }}{{ [3, 1, 2] | sort | join('-') }}{{ {'b': 1} | dictsort }}",
    "{{ 'a,b'.split(',') | last }}{{ 'x' | e }}{{ 'abc'[::-1] }}{{ messages[1:] | length }}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ kwargs }}{{ varargs }}{% endmacro %}{{ m(1, c=3) }}",
    "{{ '%s-%s' | format('a', 'b') }}{{ 'abc' | replace('b', '') }}{{ '{}-{x}'.format(1, x=2) }}",
    "{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2, 3] | slice(2) | list }}{{ [1, 2] | sum }}{{ 3.14 | round }}",
    "{{ '' | default('x', true) }}{{ none | string }}{{ 5 | int + 2 | float }}{{ {'a': 1}.items() | list }}",
    "{% for a, b in [(1, 2)] %}{{ a ~ b }}{% endfor %}{{ ['a'] + ['b'] }}{{ 7 % 3 }}{{ 'x%sy' % 'z' }}",
    "{{ messages | tojson(indent=2) }}{{ 'é' | tojson(ensure_ascii=true) }}",
)

MESSAGES = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "MAX_STEPS", 20_000)


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("name", ENDLESS)
def test_what_would_go_on_for_ever_is_given_up(name: str) -> None:
    with pytest.raises(InvalidArgument, match="does too much: it takes over 20000 steps"):
        ChatTemplate(ENDLESS[name]).render(MESSAGES)


@pytest.mark.parametrize("name", HUGE)
def test_what_one_operation_would_make_too_long_is_not_made(name: str) -> None:
    with pytest.raises(InvalidArgument, match="does too much"):
        ChatTemplate(HUGE[name]).render(MESSAGES)


LINES = "a\tb\n" * 100


@pytest.mark.parametrize(
    ("operation", "value", "arguments"),
    [
        ("indent", LINES, (50_000,)),
        ("indent", LINES, ("  " * 25_000,)),
        ("expandtabs", LINES, (50_000,)),
        ("wordwrap", LINES, (1, True, "x" * 50_000)),
        ("translate", LINES, (dict.fromkeys(range(50_000), "x"),)),
        ("replace", LINES, ("a", "x" * 50_000)),
        ("replace", LINES, ("", "x" * 50_000)),
    ],
)
def test_what_puts_much_in_at_many_places_is_refused_before_it_is_made(
    operation: str, value: str, arguments: tuple[object, ...]
) -> None:
    """Behind it nothing would be left to refuse: each argument is as long as it may be."""
    with pytest.raises(template_budget.TemplateTooLong, match="makes a value longer"):
        template_budget._check_arguments(operation, value, arguments)
    template_budget._check_arguments(operation, value[:8], arguments)


@pytest.mark.parametrize("source", HARMLESS)
def test_what_is_counted_writes_what_it_would(source: str) -> None:
    assert ChatTemplate(source).render(MESSAGES) == HARMLESS[source]


@pytest.mark.parametrize("source", AS_EVER)
def test_what_is_counted_writes_what_plain_jinja_does(source: str) -> None:
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = chat_template._to_json
    expected = plain.from_string(source).render(messages=MESSAGES)
    assert ChatTemplate(source).render(MESSAGES) == expected


def test_a_template_that_writes_without_being_told_how_much_is_not_there() -> None:
    with pytest.raises(InvalidArgument, match="lipsum"):
        ChatTemplate("{{ lipsum(n=1) }}").render(MESSAGES)


def test_work_that_steps_underrate_is_given_up_by_the_clock() -> None:
    hours: Iterator[int] = count()
    template = ChatTemplate(
        "{% for i in range(99999) %}{{ 'z' in messages }}{% endfor %}", clock=lambda: 3600.0 * next(hours)
    )
    with pytest.raises(InvalidArgument, match=f"it takes over {MAX_SECONDS:g} s"):
        template.render(MESSAGES)


def test_each_render_has_a_budget_of_its_own() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}done")
    assert [template.render(MESSAGES) for _ in range(2)] == ["done", "done"]


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.stem)
def test_a_long_conversation_takes_a_small_part_of_the_budget(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 turns; the greediest of these templates cuts the conversation anew for each of them."""
    made: list[Budget] = []

    class Seen(Budget):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]  # as it was called
            made.append(self)

    monkeypatch.setattr(chat_template, "Budget", Seen)
    turns = [{"role": ("user", "assistant")[i % 2], "content": "word " * 40} for i in range(500)]
    ChatTemplate(path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"}).render(turns)
    assert 500 < made[0].num_steps < MAX_STEPS / 64


def test_steps_are_spent_once_and_never_given_back() -> None:
    budget = Budget(lambda: 0.0)
    assert list(budget.turns(range(5))) == [0, 1, 2, 3, 4]
    assert budget.num_steps == 5
    budget.spend(MAX_STEPS - 5)
    with pytest.raises(TemplateTooLong):
        budget.spend(1)


@pytest.mark.usefixtures("few_steps")
def test_loops_that_are_not_counted_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% set r = range(300) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}done"
    with pytest.raises(InvalidArgument, match="20000 steps"):
        ChatTemplate(source).render(MESSAGES)
    monkeypatch.setattr(template_budget._Counting, "visit_For", lambda self, node: node)
    assert ChatTemplate(source).render(MESSAGES) == "done"
