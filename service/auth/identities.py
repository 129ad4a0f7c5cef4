"""The identities file: tenants with their credentials and limits, read strictly into frozen values.

[tenants.search]
tokens = [{ id = "0f3a", sha256 = "9c1e...", expires = 2027-06-30 }]
certificates = ["search.internal"]
admin = false
limits = { max_concurrent_requests = 16, tokens_per_minute = 100_000 }
"""

from __future__ import annotations

import datetime as dt
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from pageturner.service.auth.tokens import ID
from pageturner.service.codec import strict_converter
from pageturner.service.errors import ConfigError
from pageturner.service.identity import Identity, TenantLimits

MAX_TENANT_CHARACTERS = 256
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_SIGNED = frozenset({"min_priority", "max_priority"})
"""Limits that may be negative, as priorities are."""

_TENANT_KEYS = ("tokens", "certificates", "admin", "limits")
_TOKEN_KEYS = ("id", "sha256", "expires")
_CONVERTER = strict_converter()
_LIMITS: Mapping[str, Any] = get_type_hints(TenantLimits)


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token as the file has it. expires: seconds of the epoch from which on it is refused."""

    identity: Identity
    digest: bytes = field(repr=False)
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class Identities:
    """Everybody who may call. tokens: by id. certificates: by a name that a client's certificate bears."""

    tokens: Mapping[str, TokenEntry] = field(default_factory=dict)
    certificates: Mapping[str, Identity] = field(default_factory=dict)
    num_tenants: int = 0


def read_identities(path: Path) -> Identities:
    """Raises ConfigError: of `auth.identities` for a file that can't be read, else of the place within it."""
    text = read_text(path)
    try:
        return parse_identities(text)
    except ConfigError as error:
        raise ConfigError(error.key, f"{error.reason} (from {path})") from error


def read_text(path: Path) -> str:
    """Raises ConfigError for a file that can't be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigError("auth.identities", f"{path} cannot be read: {reason}") from error


def parse_identities(text: str) -> Identities:
    """Raises ConfigError naming the place, such as `tenants.search.tokens[1].sha256`."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError("auth.identities", f"is not TOML: {error}") from error
    _check_keys("", document, ("tenants",))
    tokens: dict[str, TokenEntry] = {}
    certificates: dict[str, Identity] = {}
    tenants = _table("tenants", document.get("tenants", {}))
    for name, value in tenants.items():
        place = f"tenants.{name}"
        check_tenant_name(place, name)
        table = _table(place, value)
        _check_keys(place, table, _TENANT_KEYS)
        admin = _scalar(f"{place}.admin", bool, table.get("admin", False))
        limits = _read_limits(f"{place}.limits", table.get("limits", {}))
        tenant = Identity(name, "", admin, limits)
        for at, token_id, entry in _read_tokens(f"{place}.tokens", table.get("tokens", []), tenant):
            if token_id in tokens:
                other = tokens[token_id].identity.tenant
                raise ConfigError(f"{at}.id", f"{token_id!r} is the id of another token, of {other!r}")
            tokens[token_id] = entry
        for at, certificate in _read_names(f"{place}.certificates", table.get("certificates", [])):
            if certificate in certificates:
                other = certificates[certificate].tenant
                raise ConfigError(at, f"{certificate!r} is a certificate of {other!r} already")
            certificates[certificate] = replace(tenant, credential=f"certificate {certificate}")
    return Identities(MappingProxyType(tokens), MappingProxyType(certificates), len(tenants))


def check_tenant_name(place: str, name: str) -> None:
    """Raises ConfigError for a name that the file may not have."""
    if not name or len(name) > MAX_TENANT_CHARACTERS or not name.isprintable() or name != name.strip():
        raise ConfigError(place, f"{name!r} is not 1 to {MAX_TENANT_CHARACTERS} printable characters")


def _read_tokens(place: str, value: object, tenant: Identity) -> Iterator[tuple[str, str, TokenEntry]]:
    """Place, id and entry of each."""
    for position, item in enumerate(_list(place, value)):
        at = f"{place}[{position}]"
        table = _table(at, item)
        _check_keys(at, table, _TOKEN_KEYS)
        token_id = _scalar(f"{at}.id", str, _required(at, table, "id"))
        if not ID.fullmatch(token_id):
            raise ConfigError(f"{at}.id", f"{token_id!r} is not 1 to 64 letters, digits and hyphens")
        sha256 = _required(at, table, "sha256")
        if not isinstance(sha256, str) or not _DIGEST.fullmatch(sha256):
            # Not repeated: it may be a token that was put here by mistake.
            raise ConfigError(f"{at}.sha256", "is not the 64 hexadecimal digits of a SHA-256")
        expires = _read_expiry(f"{at}.expires", table["expires"]) if "expires" in table else None
        identity = replace(tenant, credential=f"token {token_id}")
        yield at, token_id, TokenEntry(identity, bytes.fromhex(sha256), expires)


def _read_expiry(place: str, value: object) -> float:
    """A date begins at midnight UTC; a time must say its offset."""
    if isinstance(value, dt.datetime):
        if value.tzinfo is None:
            raise ConfigError(place, f"{value} has no offset; write it with Z, or a date alone")
        return value.timestamp()
    if isinstance(value, dt.date):
        midnight = dt.datetime.combine(value, dt.time(), dt.UTC)
        return midnight.timestamp()
    raise ConfigError(place, f"{value!r} is not a date such as 2027-06-30, without quotation marks")


def _read_names(place: str, value: object) -> Iterator[tuple[str, str]]:
    for position, item in enumerate(_list(place, value)):
        at = f"{place}[{position}]"
        name = _scalar(at, str, item)
        if not name or name != name.strip():
            raise ConfigError(at, f"{name!r} is empty or begins or ends with a space")
        yield at, name


def _read_limits(place: str, value: object) -> TenantLimits:
    table = _table(place, value)
    _check_keys(place, table, tuple(each.name for each in fields(TenantLimits)))
    given: dict[str, Any] = {}
    for name, raw in table.items():
        at = f"{place}.{name}"
        given[name] = limit = _scalar(at, _LIMITS[name], raw)
        if isinstance(limit, int) and limit < 0 and name not in _SIGNED:
            raise ConfigError(at, f"{limit} is negative; 0 allows none, and a limit left out is no bound")
    limits = TenantLimits(**given)
    low, high = limits.min_priority, limits.max_priority
    if low is not None and high is not None and low > high:
        raise ConfigError(f"{place}.min_priority", f"{low} is above max_priority, which is {high}")
    return limits


def _check_keys(place: str, table: Mapping[str, object], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1) or known
            hint = f"did you mean {near[0]}?" if len(near) == 1 else f"there are {', '.join(known)}"
            raise ConfigError(f"{place}.{key}" if place else key, f"unknown key; {hint}")


def _required(place: str, table: Mapping[str, object], key: str) -> object:
    if key not in table:
        raise ConfigError(f"{place}.{key}", "is missing")
    return table[key]


def _scalar(place: str, annotation: Any, value: object) -> Any:
    try:
        return _CONVERTER.structure(value, annotation)
    except ValueError as error:
        raise ConfigError(place, str(error)) from None


def _table(place: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(place, f"{value!r} is not a table")
    return value


def _list(place: str, value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise ConfigError(place, f"{value!r} is not a list")
    return value
