"""What is compared: methods crossed with schedules, as the command line names them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from ..request import METHODS
from ..schedule import POLICIES


@dataclass(frozen=True, slots=True)
class Variant:
    """One method under one schedule; ``options`` are ``make_policy``'s."""

    method: str
    schedule: str
    label: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)


def variants(methods: Sequence[str], schedules: Sequence[str]) -> list[Variant]:
    """Every method under every schedule, plain decoding once.

    A schedule is a policy's name, ``fixed:N`` (draft and verify N tokens) or
    ``threshold:P`` (cut where survival falls below P).
    """
    made: list[Variant] = []
    for method in methods:
        if method not in METHODS:
            raise UsageError(f"no method named {method!r}", f"choose from {', '.join(METHODS)}")
        if method == "none":
            made.append(Variant("none", "off", "none"))
            continue
        made += [_variant(method, schedule) for schedule in schedules]
    labels = [variant.label for variant in made]
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"{label} is named twice")
    return made


def parse_schedule(spec: str) -> tuple[str, dict[str, Any]]:
    """The policy's name, and what else ``make_policy`` needs for it."""
    name, _, value = spec.partition(":")
    if name not in POLICIES:
        raise UsageError(f"no schedule named {name!r}", f"choose from {', '.join(POLICIES)}")
    options: dict[str, Any] = {}
    try:
        if name == "fixed" and value:
            options["draft_length"] = int(value)
        elif name == "threshold":
            options["p_survival_min"] = float(value or 0.5)
        elif value:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"the schedule {spec!r} makes no sense", "write fixed:4, threshold:0.5 or just auto"
        ) from None
    return name, options


def _variant(method: str, spec: str) -> Variant:
    name, options = parse_schedule(spec)
    return Variant(method, name, f"{method} {spec}", options)
