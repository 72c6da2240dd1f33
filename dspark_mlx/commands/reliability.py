"""Reliability diagrams as one SVG: predicted survival across, observed up, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SIZE, GAP = 170, 40
BEFORE, AFTER = "#efb118", "#4269d0"


@dataclass(frozen=True)
class Diagram:
    """One position: its name, survivals before and after, and whether each token stood."""

    title: str
    before: Sequence[float]
    after: Sequence[float]
    stood: Sequence[float]


def picture(rows: Sequence[Sequence[Diagram]]) -> str:
    """A row of diagrams a kind of reply, a diagram a position."""
    body = "".join(
        _diagram(diagram, GAP + k * (SIZE + GAP), GAP + n * (SIZE + GAP))
        for n, diagrams in enumerate(rows)
        for k, diagram in enumerate(diagrams)
    )
    width = GAP + max(map(len, rows), default=0) * (SIZE + GAP)
    height = GAP + len(rows) * (SIZE + GAP) + GAP
    low = height - GAP // 2
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
        f'{body}<text x="{GAP}" y="{low}" fill="{BEFORE}">as drafted</text>'
        f'<text x="{GAP + 90}" y="{low}" fill="{AFTER}">calibrated</text>'
        f'<text x="{GAP + 180}" y="{low}">across: predicted survival, up: observed</text></svg>\n'
    )


def _diagram(diagram: Diagram, left: int, top: int) -> str:
    from ..draft.dspark.calibration_fit import reliability

    body = [
        f'<text x="{left}" y="{top - 8}">{diagram.title}</text>'
        f'<rect x="{left}" y="{top}" width="{SIZE}" height="{SIZE}" fill="none" stroke="#999"/>'
        f'<path d="M{left} {top + SIZE}L{left + SIZE} {top}" stroke="#bbb"/>'
    ]
    for told, colour in ((diagram.before, BEFORE), (diagram.after, AFTER)):
        bins = reliability(told, diagram.stood, 10)
        spots = [(left + b.predicted * SIZE, top + (1 - b.observed) * SIZE, b.count) for b in bins]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in spots)
        body.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        body += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" fill="{colour}" '
            f'r="{1.5 + 6 * (count / len(diagram.stood)) ** 0.5:.1f}" fill-opacity="0.7"/>'
            for x, y, count in spots
        ]
    return "".join(body)
