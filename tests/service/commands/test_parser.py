"""The parser of commands: words and flags in any order, defaults and names of values in the help."""

from __future__ import annotations

from pathlib import Path

import pytest

from pageturner.service.commands.parser import Parser, UsageError


def make_parser() -> Parser:
    parser = Parser(prog="pageturner test")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--target", default="here")
    parser.add_argument("--count", type=int, default=3, help="how many")
    parser.add_argument("--out", type=Path, help="where")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals (%(default)s)")
    parser.add_argument("--size", default="", help="of a block (default: the model's)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--quick", nargs="?", const="true", metavar="BOOL")
    return parser


@pytest.mark.fault("K")
@pytest.mark.parametrize(
    "line",
    ["set --target x a=1 b=2", "--target x set a=1 b=2", "set a=1 --target=x b=2", "set a=1 b=2 --target x"],
)
def test_flags_may_stand_before_between_and_after_words(line: str) -> None:
    arguments = make_parser().parse(line.split())
    assert arguments.words == ["set", "a=1", "b=2"]
    assert arguments.target == "x"


@pytest.mark.fault("K")
@pytest.mark.parametrize(
    ("line", "quick", "words"),
    [
        ("--quick hello", "true", ["hello"]),
        ("--quick false hello", "false", ["hello"]),
        ("hello --quick", "true", ["hello"]),
        ("--quick=no hello", "no", ["hello"]),
        ("hello", None, ["hello"]),
    ],
)
def test_a_boolean_flag_takes_no_word_that_is_not_its_value(
    line: str, quick: str | None, words: list[str]
) -> None:
    arguments = make_parser().parse(line.split())
    assert (arguments.quick, arguments.words) == (quick, words)


def test_words_after_two_dashes_may_look_like_flags() -> None:
    assert make_parser().parse(["--count=1", "--", "--json", "--quick"]).words == ["--json", "--quick"]


@pytest.mark.fault("K")
def test_the_help_says_defaults_and_what_a_value_looks_like() -> None:
    shown = make_parser().format_help()
    assert "--count N" in shown
    assert "how many (default 3)" in shown
    assert "runs of each (default 5)" in shown
    assert "of a block (default: the model's)\n" in shown
    assert "of arrivals (default 0)" in shown
    assert "--out FILE" in shown
    assert "where\n" in shown
    assert "as JSON\n" in shown


def test_a_mistake_is_one_line() -> None:
    with pytest.raises(UsageError) as caught:
        make_parser().parse(["--count=many"])
    assert "--count" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.fault("26")
def test_an_argument_that_is_no_text_is_refused_and_a_path_is_kept() -> None:
    with pytest.raises(UsageError, match=r"argument words: 'caf\\xe9' is not UTF-8 text"):
        make_parser().parse(["caf\udce9"])
    assert make_parser().parse(["--out", "caf\udce9"]).out == Path("caf\udce9")


@pytest.mark.fault("K")
@pytest.mark.parametrize("line", ["inner --runs 2 --json", "--runs 2 inner --json", "--json --runs=2 inner"])
def test_flags_of_a_command_of_commands_may_stand_before_its_name(line: str) -> None:
    parser = Parser(prog="pageturner outer")
    inner = parser.add_subparsers(dest="name", required=True).add_parser("inner")
    inner.add_argument("--runs", type=int)
    inner.add_argument("--json", action="store_true")
    arguments = parser.parse(line.split())
    assert (arguments.name, arguments.runs, arguments.json) == ("inner", 2, True)


@pytest.mark.fault("K")
def test_the_help_breaks_no_name_at_a_hyphen() -> None:
    parser = Parser(
        prog="pageturner test", epilog="example: " + "pageturner test cost-model:swap_weight=2 " * 4
    )
    parser.add_argument("--policy", help="one of a-very-long-name-of-a-policy, " * 4)
    shown = parser.format_help()
    assert shown.count("cost-model:swap_weight=2") == 4
    assert shown.count("a-very-long-name-of-a-policy") == 4
