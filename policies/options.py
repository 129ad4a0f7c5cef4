"""Range checks that policies make on their own options, in `__post_init__`."""

from __future__ import annotations

import math

from pageturner.policies.errors import PolicyOptionError
from pageturner.policies.service_counters import parse_weights


def check_option(
    policy: object,
    option: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> None:
    """Raise PolicyOptionError unless the option is a finite number within the bounds given."""
    value = getattr(policy, option)
    if not math.isfinite(value):
        reason = "must be finite"
    elif at_least is not None and value < at_least:
        reason = f"must be at least {at_least:g}"
    elif above is not None and value <= above:
        reason = f"must be above {above:g}"
    elif at_most is not None and value > at_most:
        reason = f"must be at most {at_most:g}"
    else:
        return
    name = getattr(policy, "name", type(policy).__name__)
    raise PolicyOptionError(name, option, f"{reason}, not {value!r}")


def check_tenant_weights(policy: object, option: str) -> None:
    """Raise PolicyOptionError unless the option reads as "tenant=weight, tenant=weight"."""
    try:
        parse_weights(getattr(policy, option))
    except ValueError as error:
        raise PolicyOptionError(getattr(policy, "name", type(policy).__name__), option, str(error)) from error
