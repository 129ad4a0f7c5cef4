"""From a name in a configuration to a policy: built in, from an entry point, or "module:Class".

A third party offers a policy by an entry point in the group `pageturner.policies.<axis>`, or without
packaging by the import path of its class. Either way it is a frozen dataclass with the method of its
axis; its fields are its options. A built-in name can't be taken by an entry point.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import sysconfig
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, TypeAlias, cast, overload

from pageturner.policies import admission, batch, eviction, queue, reclaim, routing, victim
from pageturner.policies.errors import (
    PolicyLoadError,
    PolicyOptionError,
    UnknownAxisError,
    UnknownPolicyError,
)
from pageturner.policies.interfaces import (
    ALL_AXES,
    AXES,
    AdmissionPolicy,
    BatchPolicy,
    EvictionPolicy,
    KeyChange,
    PolicySet,
    QueuePolicy,
    ReclaimPolicy,
    RoutingPolicy,
    VictimPolicy,
)
from pageturner.policies.spec import PolicySpec, parse_spec

Policy: TypeAlias = (
    QueuePolicy
    | AdmissionPolicy
    | BatchPolicy
    | VictimPolicy
    | ReclaimPolicy
    | EvictionPolicy
    | RoutingPolicy
)

BUILT_IN: Mapping[str, tuple[type[Any], ...]] = {
    "queue": (
        queue.Fcfs,
        queue.PriorityWithAging,
        queue.ShortestJobFirst,
        queue.LongestPrefixMatch,
        queue.HighestResponseRatioNext,
        queue.EarliestDeadlineFirst,
        queue.MultiLevelFeedback,
        queue.VirtualTokenCounter,
    ),
    "admission": (
        admission.FullPrompt,
        admission.FirstChunk,
        admission.Watermark,
        admission.GuaranteedNoEvict,
        admission.PeakEstimate,
    ),
    "batch": (batch.DecodeFirst, batch.PrefillFirst, batch.EqualProgress, batch.LongPrefillCap),
    "victim": (
        victim.LeastComputed,
        victim.LastArrived,
        victim.LowestPriority,
        victim.MostExclusiveBlocks,
        victim.LongestRemaining,
        victim.MostOverServed,
        victim.FewestOutputs,
    ),
    "reclaim": (
        reclaim.CostModel,
        reclaim.AlwaysRecompute,
        reclaim.AlwaysSwap,
        reclaim.HostHeadroom,
        reclaim.TailFirst,
        reclaim.SwapGroups,
    ),
    "eviction": (
        eviction.SegmentedLru,
        eviction.Lru,
        eviction.Lfu,
        eviction.CostAware,
        eviction.PriorityWithTtl,
    ),
    "routing": (
        routing.PrefixAware,
        routing.LeastTokens,
        routing.RoundRobin,
        routing.PowerOfTwo,
        routing.SessionAffinity,
    ),
}
"""The classes of each axis, its default first."""

DEFAULTS: Mapping[str, str] = {axis: classes[0].name for axis, classes in BUILT_IN.items()}

_ASKED: Mapping[str, type[Any]] = {
    "queue": QueuePolicy,
    "admission": AdmissionPolicy,
    "batch": BatchPolicy,
    "victim": VictimPolicy,
    "reclaim": ReclaimPolicy,
    "eviction": EvictionPolicy,
    "routing": RoutingPolicy,
}


@dataclass(frozen=True, slots=True)
class OptionDescription:
    """One option of a policy."""

    name: str
    type: str
    """As written in the class."""
    default: object
    """None where it is required."""
    required: bool = False


@dataclass(frozen=True, slots=True)
class PolicyDescription:
    """What `pageturner policies` prints of one policy."""

    name: str
    summary: str
    options: tuple[OptionDescription, ...]


@overload
def create(axis: Literal["queue"], name: str, options: Mapping[str, object] = ...) -> QueuePolicy: ...
@overload
def create(axis: Literal["admission"], name: str, options: Mapping[str, object] = ...) -> AdmissionPolicy: ...
@overload
def create(axis: Literal["batch"], name: str, options: Mapping[str, object] = ...) -> BatchPolicy: ...
@overload
def create(axis: Literal["victim"], name: str, options: Mapping[str, object] = ...) -> VictimPolicy: ...
@overload
def create(axis: Literal["reclaim"], name: str, options: Mapping[str, object] = ...) -> ReclaimPolicy: ...
@overload
def create(axis: Literal["eviction"], name: str, options: Mapping[str, object] = ...) -> EvictionPolicy: ...
@overload
def create(axis: Literal["routing"], name: str, options: Mapping[str, object] = ...) -> RoutingPolicy: ...
@overload
def create(axis: str, name: str, options: Mapping[str, object] = ...) -> Policy: ...
def create(axis: str, name: str, options: Mapping[str, object] = types.MappingProxyType({})) -> Policy:
    """The policy called `name` on `axis`, with `options` over its defaults.

    Raises UnknownAxisError, UnknownPolicyError, PolicyOptionError, or PolicyLoadError.
    """
    policy_class = find_class(axis, name)
    arguments = _checked_options(policy_class, name, options)
    try:
        return cast(Policy, policy_class(**arguments))
    except PolicyOptionError:
        raise
    except (Exception, SystemExit) as error:  # a third party's own check of its options
        raise PolicyLoadError(axis, name, f"refuses its options: {_said(error)}") from error


def create_set(specs: Mapping[str, PolicySpec | str]) -> PolicySet:
    """One policy an axis; a text is read by `parse_spec`, and axes left out get their default.

    Raises as `create`, or PolicySpecError.
    """
    for axis in specs:
        _check_axis(axis, AXES)
    made: dict[str, Any] = {}
    for axis in AXES:
        spec = specs.get(axis, DEFAULTS[axis])
        spec = parse_spec(spec) if isinstance(spec, str) else spec
        made[axis] = create(axis, spec.name, spec.options)
    return PolicySet(**made)


def default_policies() -> PolicySet:
    """The default of every axis."""
    return create_set({})


def names(axis: str) -> tuple[str, ...]:
    """The policies that `create` knows on this axis by a plain name, built-ins first; imports nothing."""
    built_in = [policy_class.name for policy_class in _classes(axis)]
    return (*built_in, *sorted(_plugins(axis).keys() - set(built_in)))


def describe(axis: str) -> tuple[PolicyDescription, ...]:
    """Every policy of the axis with its options, in the order of `names`. Imports those of others."""
    return tuple(_describe(name, find_class(axis, name)) for name in names(axis))


def find_class(axis: str, name: str) -> type[Any]:
    """The class behind a name; one from outside is checked to be a policy of the axis."""
    for policy_class in _classes(axis):
        if policy_class.name == name:
            return policy_class
    if ":" in name:
        return _checked_class(axis, name, _import(axis, name))
    plugin = _plugins(axis).get(name)
    if plugin is None:
        raise UnknownPolicyError(axis, name, names(axis))
    try:
        loaded = plugin.load()
    except (Exception, SystemExit) as error:  # another author's module may raise anything at import
        raise PolicyLoadError(
            axis, name, f"its entry point {plugin.value} cannot be loaded: {_said(error)}"
        ) from error
    return _checked_class(axis, name, loaded)


def name_of(policy: object) -> str:
    """What to write in a configuration to get this policy: its name if built in, else "module:Class"."""
    policy_class = type(policy)
    if any(policy_class in classes for classes in BUILT_IN.values()):
        return str(policy_class.name)  # type: ignore[attr-defined]  # every built-in has one
    return f"{policy_class.__module__}:{policy_class.__qualname__}"


def spec_of(policy: object) -> PolicySpec:
    """The policy's name and options: `create` makes an equal policy of them."""
    return PolicySpec(name_of(policy), options_of(policy))


def options_of(policy: object) -> dict[str, object]:
    """The policy's options as `create` takes them."""
    return {field.name: getattr(policy, field.name) for field in _option_fields(type(policy))}


def _check_axis(axis: str, known: tuple[str, ...] = ALL_AXES) -> None:
    if axis not in known:
        raise UnknownAxisError(axis, known)


def _classes(axis: str) -> tuple[type[Any], ...]:
    _check_axis(axis)
    return BUILT_IN[axis]


def _plugins(axis: str) -> dict[str, EntryPoint]:
    return {plugin.name: plugin for plugin in entry_points(group=f"pageturner.policies.{axis}")}


def _import(axis: str, path: str) -> object:
    module_name, _, class_name = path.partition(":")
    try:
        found: object = importlib.import_module(module_name)
        for part in class_name.split("."):
            found = getattr(found, part, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise PolicyLoadError(axis, path, f"cannot import {module_name!r}: {error}") from error
        raise PolicyLoadError(axis, path, _not_found(module_name)) from error
    except (Exception, SystemExit) as error:  # another author's module may raise anything at import
        raise PolicyLoadError(axis, path, f"cannot import {module_name!r}: {_said(error)}") from error
    if found is None:
        raise PolicyLoadError(axis, path, f"module {module_name!r} has no {class_name!r}")
    return found


def _not_found(module_name: str) -> str:
    """Where a module was looked for, without what came with Python, and how to have it found."""
    paths = sysconfig.get_paths()
    inside = tuple(paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    folders = [folder or "." for folder in sys.path if not folder.startswith(inside) and ".zip" not in folder]
    looked = ", ".join(dict.fromkeys(folders)) or "the installed packages alone"
    return (
        f"cannot import {module_name!r}: looked in {looked} and the installed packages; put its file beside "
        "the configuration file, or name its folder in the environment variable PYTHONPATH"
    )


def _said(error: BaseException) -> str:
    """What an error says, and its type where that is not plain from the text."""
    try:
        text = str(error)
    except Exception:
        text = ""
    is_plain = isinstance(error, (ImportError, ValueError)) and text
    return text if is_plain else f"{type(error).__name__}: {text}"


def _checked_class(axis: str, name: str, found: object) -> type[Any]:
    if not isinstance(found, type):
        raise PolicyLoadError(axis, name, "is not a class")
    parameters = getattr(found, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        raise PolicyLoadError(axis, name, "is not a frozen dataclass (@dataclass(frozen=True))")
    for method, expected in vars(_ASKED[axis]).items():
        if method.startswith("_") or not inspect.isfunction(expected):
            continue
        offered = getattr(found, method, None)
        signature = inspect.signature(expected)
        if not callable(offered) or not _takes(offered, len(signature.parameters)):
            raise PolicyLoadError(axis, name, f"has no method {method}{signature}")
    if axis == "queue" and not isinstance(getattr(found, "key_change", None), KeyChange):
        raise PolicyLoadError(
            axis, name, "does not say when its key changes (key_change: ClassVar[KeyChange])"
        )
    return found


def _takes(method: Any, num_positional: int) -> bool:
    try:
        inspect.signature(method).bind(*range(num_positional))
    except TypeError:
        return False
    return True


def _option_fields(policy_class: type[Any]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(policy_class) if field.init]


def _describe(name: str, policy_class: type[Any]) -> PolicyDescription:
    summary = (
        getattr(policy_class, "summary", None) or (inspect.getdoc(policy_class) or "").partition("\n")[0]
    )
    hints = typing.get_type_hints(policy_class)
    options = tuple(
        OptionDescription(field.name, _type_name(hints[field.name]), _default(field), _is_required(field))
        for field in _option_fields(policy_class)
    )
    return PolicyDescription(name, summary, options)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _checked_options(policy_class: type[Any], name: str, options: Mapping[str, object]) -> dict[str, object]:
    fields = {field.name: field for field in _option_fields(policy_class)}
    hints = typing.get_type_hints(policy_class)
    for option in options:
        if option not in fields:
            known = f"there are: {', '.join(fields)}" if fields else "it has none"
            raise PolicyOptionError(name, option, f"is unknown ({known})")
    for option, field in fields.items():
        if option not in options and _is_required(field):
            raise PolicyOptionError(name, option, "is required")
    return {option: _converted(name, option, value, hints[option]) for option, value in options.items()}


def _converted(policy: str, option: str, value: object, annotation: Any) -> object:
    """The value as the annotation wants it: an int does for a float, a bool does not for an int."""
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise PolicyOptionError(policy, option, f"is out of range: {value!r}")
    if _matches(value, annotation):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and _matches(float(value), annotation):
        return float(value)
    raise PolicyOptionError(
        policy, option, f"must be {_type_name(annotation)}, not {value!r} ({type(value).__name__})"
    )


def _matches(value: object, annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, choice) for choice in typing.get_args(annotation))
    if origin is Literal:
        return value in typing.get_args(annotation)
    if annotation in (None, types.NoneType):
        return value is None
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or annotation)


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")
