"""The state at this moment: time shares, memory, context, all requests, and the status row."""

from __future__ import annotations

from collections.abc import Callable

from dspark_mlx.stats import EngineStats, RequestStats

from ..canvas import Canvas
from ..display_text import count, fit, one_line, size
from . import axes
from .axes import number, percent


def shares(stats: EngineStats, width: int, height: int) -> Canvas:
    """Draft, verify and host share of the time: a bar and its legend."""
    canvas = Canvas(width, height)
    draft, verify, host = stats.time_shares()
    parts = [f"draft {percent(draft)}", f"verify {percent(verify)}", f"host {percent(host)}"]
    axes.title(canvas, "time", [" ".join(parts), " ".join(parts[:2])])
    canvas.stacked(
        0, 1, width, [(draft, "▓", "draft"), (verify, "█", "target"), (host, "░", "axis")]
    )
    return canvas


def memory(stats: EngineStats, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    held = stats.memory
    weights = held.weights or (stats.loaded.weight_bytes if stats.loaded else 0)
    peak = max(held.peak, weights + held.kv, 1)
    kv = f"KV {size(held.kv)}"
    parts = [kv, f"weights {size(weights)}", f"peak {size(held.peak)}"]
    axes.title(canvas, "memory", [" ".join(parts), " ".join([kv, parts[2]]), kv])
    free = 1 - (weights + held.kv) / peak
    bars = [(weights / peak, "█", "target"), (held.kv / peak, "▓", "draft"), (free, "░", "axis")]
    canvas.stacked(0, 1, width, bars)
    return canvas


def context(stats: EngineStats, width: int, height: int) -> Canvas:
    canvas = Canvas(width, height)
    limit = stats.loaded.context_limit if stats.loaded else 0
    used = max((r.context for r in stats.newest), default=0)
    axes.title(canvas, "context", f"{used:,} of {limit:,}" if limit else f"{used:,}")
    canvas.text(0, 1, "░" * width, "axis")
    canvas.bar(0, 1, width, used / limit if limit else 0.0, "measured")
    return canvas


def _named(request: RequestStats, width: int) -> str:
    """A request's label, as far as there is room for it, and its id."""
    short = request.id if len(request.id) < 12 else "…" + request.id[-10:]
    title = fit(one_line(request.label), width - 1 - len(short))
    return f"{title} {short}" if title else short


def requests_table(stats: EngineStats, width: int, height: int) -> Canvas:
    """All requests, the active ones first, then the newest: lengths and speeds."""
    canvas = Canvas(width, height)
    columns: list[tuple[str, int, Callable[[RequestStats], str]]] = [
        ("state", 9, lambda r: r.phase),
        ("method", 8, lambda r: r.method or "-"),
        ("context", 8, lambda r: count(r.context)),
        ("tokens", 7, lambda r: count(r.counts.tokens)),
        ("now/s", 7, lambda r: number(r.tps_now) if r.active else "-"),
        ("mean/s", 7, lambda r: number(r.tps_mean)),
        ("accept", 7, lambda r: percent(r.counts.acceptance)),
        ("a round", 8, lambda r: number(r.counts.tokens_per_round, 2)),
        ("cut", 4, lambda r: str(r.last_draft.scheduled) if r.last_draft else "-"),
    ]
    if width < 90:
        del columns[1]  # the method: mostly the same for all
    room = min(44, max(12, width - sum(wide for _, wide, _ in columns)))
    columns.insert(0, ("request", room, lambda r: _named(r, room - 1)))
    newest = reversed(stats.requests.values())
    rows = sorted(newest, key=lambda r: r.active, reverse=True)
    active = len(stats.active)
    axes.title(
        canvas,
        "requests",
        f"{active} active, {stats.queued} queued, policy {stats.policy or '-'}",
    )
    x = 0
    for name, wide, value in columns:
        if x + wide > width:
            break
        left = name in ("request", "state", "method")
        for y, text in enumerate([name, *(value(r) for r in rows[: height - 2])], 1):
            style = "axis" if y == 1 else ("text" if rows[y - 2].active else "dim")
            text = text if name == "request" else text[: wide - 1]
            canvas.text(x if left else x + wide - 1 - len(text), y, text, style)
        x += wide
    return canvas


def status_line(stats: EngineStats, width: int, height: int = 1) -> Canvas:
    """The most important numbers in one row, as many as fit."""
    canvas = Canvas(width, 1)
    active, loaded = stats.active, stats.loaded
    parts: list[tuple[str, str]] = []
    if stats.samples:
        each = " a reply" if len(active) > 1 else ""
        parts.append((f"{number(stats.tps_now)} tok/s", "value"))
        parts.append((f"mean {number(stats.tps_per_request)}{each}", "dim"))
        if stats.speedup:  # the mean's
            gain = f"×{stats.speedup:.2f} over {number(stats.plain_tps)} plain"
            parts.append((gain, "good" if stats.speedup >= 1 else "reject"))
        parts.append((f"{percent(stats.recent_acceptance)} accepted", "draft"))
        parts.append((f"{number(stats.recent_tokens_per_round, 2)} a round", "dim"))
        if active:
            used = count(max(r.context for r in active))
            limit = f"/{count(loaded.context_limit)}" if loaded and loaded.context_limit else ""
            parts.append((f"ctx {used}{limit}", "dim"))
        if stats.load.slowdown_fast > 1.15:
            parts.append((f"device ×{stats.load.slowdown_fast:.1f} slower", "reject"))
        if len(active) > 1:
            parts.append((f"{len(active)} replies", "target"))
    elif loaded:
        parts.append((f"{loaded.method}: {loaded.reason}", "dim"))
        if stats.plain_tps:
            parts.append((f"plain {number(stats.plain_tps)} tok/s", "dim"))
    x = 1
    for text, style in parts:
        if x + len(text) > width - 1:
            break
        x = canvas.text(x, 0, text, style) + 2
    return canvas
