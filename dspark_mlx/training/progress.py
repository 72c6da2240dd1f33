"""What a person sees of a run: lines while it goes, a jsonl log, and a picture of the curves."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .run_state import RunState, StepReport
from .validate import Validation


class Progress:
    """Follows a run: prints at most one line in ``every`` seconds, logs every step."""

    def __init__(
        self, out: Path, steps: int, say: Callable[[str], None], every: float = 10.0
    ) -> None:
        self.out, self.steps, self.say, self.every = out, steps, say, every
        self.log = out / "log.jsonl"
        self._said_at = 0.0
        self._recent: list[StepReport] = []

    def step(self, report: StepReport) -> None:
        self._write({"kind": "step", **asdict(report)})
        self._recent.append(report)
        now = time.monotonic()
        if now - self._said_at < self.every and report.step < self.steps:
            return
        self._said_at = now
        self.say(self.line(self._recent))
        self._recent = self._recent[-20:]

    def line(self, recent: Sequence[StepReport]) -> str:
        """The last steps on one line."""
        last, n = recent[-1], len(recent)
        seconds = sum(r.seconds for r in recent)
        rate, slots = (
            sum(r.tokens for r in recent) / seconds,
            sum(r.slots for r in recent) / seconds,
        )
        left = (self.steps - last.step) * seconds / n

        def mean(name: str) -> float:
            return float(sum(getattr(r, name) for r in recent) / n)

        return (
            f"step {last.step}/{self.steps} pass {last.epoch + 1}  loss {mean('loss'):.3f} "
            f"(ce {mean('cross_entropy'):.2f} l1 {mean('total_variation'):.3f} "
            f"conf {mean('confidence'):.3f})  accepted {mean('accepted'):.2f}  "
            f"lr {last.lr:.1e}  {rate:.0f} tok/s {slots:.0f} slots/s  left {duration(left)}"
        )

    def validation(self, step: int, result: Validation, best: bool) -> None:
        self._write({"kind": "validation", "step": step, "best": best, **result.to_dict()})
        domains = " ".join(f"{k} {v:.2f}" for k, v in result.by_domain.items())
        slots = " ".join(f"{v:.2f}" for v in result.by_slot)
        self.say(
            f"  held out: accepted {result.greedy:.3f} greedy ({domains}), "
            f"{result.sampled:.3f} sampled; by slot {slots}; loss {result.loss:.3f}"
            + ("  best so far, saved" if best else "")
        )
        self.draw()

    def finish(self, state: RunState) -> None:
        self.draw()
        best = (
            f"best held-out accepted length {state.best:.3f} at step {state.best_step}"
            if state.best_step
            else "not yet validated: the drafter is the last"
        )
        self.say(
            f"{state.step} steps, {state.tokens:,} tokens, {state.slots:,} slots in "
            f"{duration(state.seconds)}; {best}"
        )

    def draw(self) -> None:
        """Write ``training.svg`` from the log."""
        rows = read_log(self.log)
        scratch = self.out / ".training.svg"
        scratch.write_text(curves(rows), encoding="utf-8")
        os.replace(scratch, self.out / "training.svg")

    def _write(self, row: dict[str, Any]) -> None:
        try:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_rounded(row)) + "\n")
        except OSError as error:  # closing a full disk's file does not name it
            raise OSError(error.errno, error.strerror, str(self.log)) from None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log; a resumed run's repeated steps count once, the later ones."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
            rows[row["kind"], row["step"]] = row
        except (ValueError, KeyError):
            continue  # half a line of a run that was killed
    return sorted(rows.values(), key=lambda r: r["step"])


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes}:{rest:02d}"


# -- the picture ---------------------------------------------------------------------------

_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#a463f2", "#9c6b4e")
_WIDTH, _HEIGHT, _LEFT, _TOP = 420, 260, 52, 34


def curves(rows: Sequence[dict[str, Any]]) -> str:
    """An SVG of losses, accepted lengths and survival by slot over the steps."""
    steps = [r for r in rows if r["kind"] == "step"]
    checks = [r for r in rows if r["kind"] == "validation"]
    losses = {
        name: _smooth([(r["step"], r[key]) for r in steps])
        for name, key in (
            ("loss", "loss"),
            ("L1", "total_variation"),
            ("confidence", "confidence"),
        )
    } | {"held-out loss": [(r["step"], r["loss"]) for r in checks]}
    accepted = {
        "training, sampled": _smooth([(r["step"], r["accepted"]) for r in steps]),
        "held out, sampled": [(r["step"], r["sampled"]) for r in checks],
        "held out, greedy": [(r["step"], r["greedy"]) for r in checks],
    }
    for domain in sorted({d for r in checks for d in r["by_domain"]}):
        accepted[domain] = [
            (r["step"], r["by_domain"][domain]) for r in checks if domain in r["by_domain"]
        ]
    width = max((len(r["by_slot"]) for r in checks), default=0)
    slots = {f"slot {k + 1}": [(r["step"], r["by_slot"][k]) for r in checks] for k in range(width)}
    panels = [("Losses", losses), ("Accepted length", accepted), ("Greedy survival", slots)]
    body = "".join(_panel(title, lines, i * _WIDTH) for i, (title, lines) in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH * len(panels)}" '
        f'height="{_HEIGHT + 90}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="#fff"/>{body}</svg>\n'
    )


Line = list[tuple[float, float]]


def _smooth(points: Line) -> Line:
    """At most 200 points, each the mean of its neighbours."""
    size = max(1, -(-len(points) // 200))
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks]


def _panel(title: str, lines: dict[str, Line], offset: int) -> str:
    lines = {name: points for name, points in lines.items() if points}
    values = [y for points in lines.values() for _, y in points]
    if not values:
        return ""
    low, high = min(values), max(values)
    high = high if high > low else low + 1
    last = max(x for points in lines.values() for x, _ in points)
    width, height = _WIDTH - _LEFT - 20, _HEIGHT - _TOP - 20

    def at(x: float, y: float) -> str:
        across, up = x / max(last, 1), (y - low) / (high - low)
        return f"{offset + _LEFT + across * width:.1f},{_TOP + (1 - up) * height:.1f}"

    out = [f'<text x="{offset + _LEFT}" y="18" font-size="14">{title}</text>']
    for i in range(5):
        y = low + (high - low) * i / 4
        x0, y0 = at(0, y).split(",")
        x1 = at(last, y).split(",")[0]
        out.append(f'<path d="M{x0} {y0}H{x1}" stroke="#ddd"/>')
        out.append(
            f'<text x="{float(x0) - 6}" y="{float(y0) + 4}" text-anchor="end">{y:.3g}</text>'
        )
    out.append(
        f'<text x="{offset + _LEFT + width}" y="{_TOP + height + 16}" '
        f'text-anchor="end">step {last:.0f}</text>'
    )
    for i, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join(at(x, y) for x, y in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        x, y = offset + _LEFT + (i % 3) * 120, _HEIGHT + 12 + (i // 3) * 16
        out.append(f'<rect x="{x}" y="{y - 8}" width="10" height="10" fill="{colour}"/>')
        out.append(f'<text x="{x + 14}" y="{y + 1}">{name}</text>')
    return "".join(out)
