"""What a person sees of a run: lines while it goes, a jsonl log, and a chart of the curves."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..charts import LineChart, Point, Series, page
from ..files import write_atomically
from .checkpoint import RunState
from .step import StepReport
from .validate import Validation

CHART_POINTS = 200  # most points of a line


class RunLog:
    """Follows a run: logs every step in ``log.jsonl`` and prints a line every ``every`` seconds."""

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
        """The means of the last steps on one line."""
        last, n = recent[-1], len(recent)
        seconds = sum(r.seconds for r in recent)
        tokens, slots = sum(r.tokens for r in recent), sum(r.slots for r in recent)
        left = (self.steps - last.step) * seconds / n

        def mean(name: str) -> float:
            return float(sum(getattr(r, name) for r in recent) / n)

        return (
            f"step {last.step}/{self.steps} pass {last.epoch + 1}  loss {mean('loss'):.3f} "
            f"(ce {mean('cross_entropy'):.2f} l1 {mean('total_variation'):.3f} "
            f"conf {mean('confidence'):.3f})  accepted {mean('accepted'):.2f}  lr {last.lr:.1e}  "
            f"{tokens / seconds:.0f} tok/s {slots / seconds:.0f} slots/s  left {duration(left)}"
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
        write_atomically(self.out / "training.svg", curves(read_log(self.log)))

    def _write(self, row: dict[str, Any]) -> None:
        try:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_rounded(row)) + "\n")
        except OSError as error:  # closing a full disk's file does not name it
            raise OSError(error.errno, error.strerror, str(self.log)) from None


def _rounded(value: Any) -> Any:
    """``value`` with six significant digits in every number."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log. Of a step that a resumed run repeated, the later row counts."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
            rows[row["kind"], row["step"]] = row
        except (ValueError, KeyError):
            continue  # half a line of a run that was killed
    return sorted(rows.values(), key=lambda r: r["step"])


def duration(seconds: float) -> str:
    """Seconds as ``M:SS``, from an hour on as ``H h MM min``."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes}:{rest:02d}"


def curves(rows: Sequence[dict[str, Any]]) -> str:
    """An SVG of losses, accepted lengths and survival by slot over the steps."""
    steps = [r for r in rows if r["kind"] == "step"]
    checks = [r for r in rows if r["kind"] == "validation"]

    def training(name: str, key: str) -> Series:
        return Series(name, _thinned([(r["step"], r[key]) for r in steps]))

    def held_out(name: str, values: Sequence[float | None]) -> Series:
        found = zip([r["step"] for r in checks], values, strict=True)
        return Series(name, tuple((step, y) for step, y in found if y is not None))

    losses = [training(n, n.replace(" ", "_")) for n in ("loss", "total variation", "confidence")]
    losses.append(held_out("held-out loss", [r["loss"] for r in checks]))
    accepted = [
        training("training, sampled", "accepted"),
        held_out("held out, sampled", [r["sampled"] for r in checks]),
        held_out("held out, greedy", [r["greedy"] for r in checks]),
    ]
    for domain in sorted({d for r in checks for d in r["by_domain"]}):
        accepted.append(held_out(domain, [r["by_domain"].get(domain) for r in checks]))
    width = max((len(r["by_slot"]) for r in checks), default=0)
    slots = [held_out(f"slot {k + 1}", [r["by_slot"][k] for r in checks]) for k in range(width)]
    panels = (
        ("Losses", "nats, L1", losses),
        ("Accepted length", "tokens per round", accepted),
        ("Greedy survival", "share of blocks", slots),
    )
    charts = [
        LineChart(title, "step", unit, tuple(s for s in lines if s.points), from_zero=False)
        for title, unit, lines in panels
    ]
    return page(charts, columns=3, width=420, height=350, legend="below")


def _thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """At most ``CHART_POINTS`` points, each the mean of its neighbours."""
    size = max(1, -(-len(points) // CHART_POINTS))
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return tuple((sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks)
