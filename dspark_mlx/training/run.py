"""A whole training run: from a loaded target and files of answers to a drafter folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..draft.dspark.config import DrafterConfig
from ..errors import UsageError
from ..model.target import Target
from . import data
from .checkpoint import (
    RunState,
    check_out,
    check_same_run,
    list_checkpoints,
    load_checkpoint,
    model_fingerprint,
)
from .features import FeatureCache, FeatureSource, Teacher
from .new_drafter import build_drafter, fresh_drafter, trained_drafter
from .run_log import RunLog
from .step import StepComputer
from .train_options import TrainOptions
from .trainer import Trainer, parameter_count


def train_drafter(
    model: Any,
    tokenizer: Any,
    config: dict[str, Any],
    files: Sequence[Path],
    out: Path,
    options: TrainOptions,
    *,
    exclude: Sequence[Path] = (),
    cache_bytes: int = 0,
    save_dtype: mx.Dtype = mx.bfloat16,
    say: Callable[[str], None] = print,
    log_seconds: float = 10.0,
    group: Any | None = None,
) -> RunState:
    """Train the drafter in ``out``, or go on training it. Returns where the run ended.

    ``config`` is the target's config.json, ``files`` hold answers, and prompts in ``exclude`` are
    never trained on. ``cache_bytes`` bounds the feature cache. ``say`` hears a line at most every
    ``log_seconds``. Raises UsageError for data or options that cannot be used.
    """
    check_out(out)
    group = group or mx.distributed.init()
    target = Target(model, config)
    first = group.rank() == 0
    if not first:
        say = _silent
    samples = data.encode_all(
        data.read_records(files), tokenizer, options.max_length, target.vocab_size
    )
    never = frozenset(r.key for r in data.read_records(exclude))
    training, held = data.split(samples, options.held_out, never)
    say(
        f"{len(training):,} answers of {sum(s.answer_length for s in training):,} tokens "
        f"({sum(map(len, training)):,} with prompts), {len(held):,} held out"
    )

    found, target_name = list_checkpoints(out / "checkpoints"), model_fingerprint(model)
    if found:
        kept, _, vocab_ids = load_checkpoint(found[-1])
        check_same_run(kept["options"], options)
        if kept.get("target", target_name) != target_name:
            raise UsageError(f"the run in {out} is of another model", "give another --out")
        shape = DrafterConfig.from_dict(kept["drafter"])
        # With any weights: those of the checkpoint replace them.
        drafter = build_drafter(shape, target, vocab_ids, seed=options.seed)
    elif options.start_from:
        drafter, vocab_ids = trained_drafter(options, target, say)
    else:
        drafter, vocab_ids = fresh_drafter(options, target, tokenizer, training, say)
    taps = drafter.config.target_layer_ids
    teacher = Teacher(target, vocab_ids)
    teacher.check(target, taps)
    cache = None
    if cache_bytes:
        where = out / "cache"
        limit = cache_bytes // group.size()
        cache = FeatureCache(where, taps, target.hidden_size, limit, group.rank(), target_name)
        whole = sum(map(len, samples)) * cache.row_bytes
        say(
            f"feature cache: at most {cache_bytes / 1e9:.1f} GB in {where}; all of the data would "
            f"be {whole / 1e9:.1f} GB"
        )
    source = FeatureSource(target, taps, teacher, cache)
    computer = StepComputer(drafter, source, options.loss, vocab_ids, target.vocab_size)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error}") from None
    log = RunLog(out, options.steps, say, log_seconds)
    trainer = Trainer(
        computer,
        training,
        held,
        options,
        out,
        vocab_ids=vocab_ids,
        group=group,
        save_dtype=save_dtype,
        on_step=log.step if first else _silent,
        on_validation=log.validation if first else _silent,
        on_message=say,
    )
    trainer.state.target = target_name
    if trainer.resume():
        say(f"resuming at step {trainer.state.step}, pass {trainer.state.epoch + 1}")
    else:
        (out / "recipe.json").write_text(json.dumps(options.to_dict(), indent=2) + "\n")
        say(
            f"drafter of {parameter_count(drafter):,} trainable parameters, "
            f"taps {', '.join(map(str, taps))}, mask token {drafter.config.mask_token_id}"
        )
    state = trainer.run()
    say(f"peak memory {mx.get_peak_memory() / 1e9:.1f} GB")
    if first:
        log.finish(state)
    return state


def _silent(*args: Any) -> None:
    """For the processes that do not report."""
