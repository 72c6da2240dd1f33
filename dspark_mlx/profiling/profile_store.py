"""Where measured costs are stored as JSON, and what each of them holds for."""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from dataclasses import astuple
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil
from mlx.utils import tree_flatten

from .. import blas
from ..engine.engine import Engine
from ..errors import UsageError
from ..schedule.cost import CostKey, CostModel
from ..sources.store import default_cache_dir


def cost_key(engine: Engine, model: str, drafter: str | None = None) -> CostKey:
    """Everything that a measurement of ``engine`` depends on.

    ``drafter`` is part of it only where one is loaded.
    """
    methods = ", ".join(f"{p.spec.name} {p.spec.block}" for p in engine.batch.proposers.values())
    loaded = any(p.spec.keeps_state for p in engine.batch.proposers.values())
    pair = f"{model} + {drafter}" if drafter and loaded else model
    return CostKey(
        model=f"{pair}, {engine.target.weight_bytes} bytes, {methods or 'no proposer'}",
        quantisation=_precision(engine),
        device=device_name(),
        mlx=mlx_version(),
    )


def mlx_version() -> str:
    return version("mlx")


def device_name() -> str:
    """The GPU's name, or the processor's with the number of cores and the BLAS in use."""
    if not on_cpu():
        return str(mx.device_info().get("device_name", "gpu"))
    name = platform.processor() or platform.machine()
    if platform.system() == "Linux":
        name = _linux_processor() or name
    library = blas.prefer_fast_blas() or "mlx's own BLAS"
    return f"{name}, {psutil.cpu_count() or 1} cores, {library}"


def profile_path(key: CostKey, cache_dir: Path | None = None) -> Path:
    name = hashlib.sha256(repr(astuple(key)).encode()).hexdigest()[:20]
    return (cache_dir or default_cache_dir()) / "profiles" / f"{name}.json"


def read_profile(path: Path, key: CostKey) -> CostModel | None:
    """The stored measurement; None where there is none for ``key``, or it is damaged or of a
    form that is no longer read."""
    try:
        cost = CostModel.from_json(path.read_text("utf-8"))
    except (OSError, ValueError, UsageError):
        return None
    return cost if cost.key == key and cost.known else None


def write_profile(path: Path, cost: CostModel) -> None:
    """Write it as a whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(cost.to_json() + "\n")
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def covers(cost: CostModel, engine: Engine) -> bool:
    """Whether ``cost`` was measured for as many rows as ``engine`` may decode."""
    return max(cost.step[min(cost.step)]) >= engine.max_rows  # long contexts may know one row only


def _precision(engine: Engine) -> str:
    target = engine.target
    parts = [f"target {_bits(target.model)}"]
    proposers = [getattr(p, "inner", p) for p in engine.batch.proposers.values()]
    drafters = [getattr(p, "drafter", None) for p in proposers]
    parts += [f"drafter {_bits(d)}" for d in drafters if isinstance(d, nn.Module)]
    parts.append(f"kv {target.kv_bits}-bit" if target.kv_bits else "kv as computed")
    return ", ".join(parts)


def _bits(model: nn.Module) -> str:
    """``4-bit bfloat16``, or just the floating type."""
    bits = {m.bits for m in model.modules() if hasattr(m, "bits") and hasattr(m, "group_size")}
    weights: Any = tree_flatten(model.parameters())
    kinds = {str(weight.dtype).removeprefix("mlx.core.") for _, weight in weights}
    words = [f"{'/'.join(map(str, sorted(bits)))}-bit"] if bits else []
    return " ".join([*words, *sorted(k for k in kinds if "float" in k)])


def on_cpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def _linux_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return ""
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")
