"""Layers of a model that are watched while it runs: their outputs kept, or dispatched early.

A watched layer gets a subclass that calls its own ``__call__`` and passes on what
went in and came out; parameters and module tree stay as they are, and the class
is put back when the watch ends. A model is watched by one thread at a time
(``Target.model_lock``). Knows nothing of targets or caches.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

EMBEDDING = -1  # the tap that stands for the input of the first layer
# Layers handed to the device at a time. Two made a step of 1, 2, 4 and 6 tokens x0.90, 0.88, 0.95
# and 0.90 as long (benchmarks/begin.py, 2-core Linux, 2026-11-30).
EAGER_LAYERS = 2

EagerDispatch = Callable[[mx.array], None]
Keep = Callable[[Any, Any], None]


@contextmanager
def record(
    layers: Sequence[nn.Module], taps: Sequence[int], eager: EagerDispatch | None = None
) -> Iterator[dict[int, mx.array]]:
    """While open, keep the outputs of ``layers[i]`` for each tap i (-1: the input of layer 0).

    A lazy backend builds the graph of the whole model before it computes any of
    it. With ``eager``, called with the output of every ``EAGER_LAYERS``-th layer,
    the device works on the first layers while the host still builds the others.
    """
    seen: dict[int, mx.array] = {}
    # By module, not by index: a model may run one module as several layers.
    wanted: dict[int, tuple[nn.Module, list[Keep]]] = {}

    def want(layer: nn.Module, keep: Keep) -> None:
        wanted.setdefault(id(layer), (layer, []))[1].append(keep)

    for tap in dict.fromkeys(taps):
        want(layers[max(tap, 0)], _keeper(seen, tap))
    if eager is not None:
        for layer in {id(layer): layer for layer in layers[::EAGER_LAYERS]}.values():
            want(layer, lambda x, out: eager(_hidden(out)))
    with ExitStack() as undo:
        for layer, keeps in wanted.values():
            undo.callback(_attach(layer, keeps))
        yield seen


@contextmanager
def watched(module: nn.Module, keep: Callable[[mx.array], None]) -> Iterator[None]:
    """While open, pass each output of ``module`` on to ``keep``."""
    detach = _attach(module, [lambda x, out: keep(out)])
    try:
        yield
    finally:
        detach()


def _keeper(seen: dict[int, mx.array], tap: int) -> Keep:
    def keep(x: Any, out: Any) -> None:
        seen[tap] = x if tap == EMBEDDING else _hidden(out)

    return keep


def _hidden(out: Any) -> mx.array:
    """A layer's hidden states; some layers return more beside them."""
    return out[0] if isinstance(out, tuple) else out


def _attach(module: nn.Module, keeps: Sequence[Keep]) -> Callable[[], None]:
    """Have each of ``keeps`` called with (input, output) of ``module``; returns the undo."""
    original = type(module)
    object.__setattr__(module, "_keeps", (threading.get_ident(), keeps))
    object.__setattr__(module, "__class__", _recording(original))

    def detach() -> None:
        object.__setattr__(module, "__class__", original)
        object.__delattr__(module, "_keeps")

    return detach


@functools.cache
def _recording(original: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original.__call__(self, *args, **kwargs)
        given = (*args, *kwargs.values())  # some models name even the first
        thread, keeps = self.__dict__.get("_keeps", (0, ()))
        if thread == threading.get_ident():  # what others run meanwhile is not watched
            for keep in keeps:
                keep(given[0], out)
        return out

    return type(f"Tapped{original.__name__}", (original,), {"__call__": call})
