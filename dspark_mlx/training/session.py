"""From a loaded target and files to a finished run: wires the parts together, decides nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..draft.dspark.config import DrafterConfig
from ..draft.dspark.load import load_drafter
from ..draft.dspark.network import Drafter
from ..errors import UsageError
from ..model.target import Target
from . import bigrams, data, vocab
from .checkpoint import list_checkpoints, load_checkpoint
from .features import FeatureCache, FeatureSource, Teacher
from .init import build_drafter, choose_mask_token, new_config, spread_taps
from .options import TrainOptions
from .progress import Progress
from .run_state import RunState, check_out, check_same_run, model_fingerprint
from .step import StepComputer
from .trainer import Trainer, parameter_count


def train(
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
    """Train, or resume training, the drafter in ``out``. Returns where the run ended."""
    check_out(out)
    group = group or mx.distributed.init()
    target = Target(model, config)
    first = group.rank() == 0
    tell = say if first else _silent
    samples = data.encode_all(
        data.read_records(files), tokenizer, options.max_length, target.vocab_size
    )
    never = frozenset(r.key for r in data.read_records(exclude))
    training, held = data.split(samples, options.held_out, never)
    counts = vocab.count_ids(training, target.vocab_size)
    tell(
        f"{len(training):,} answers of {sum(s.answer_length for s in training):,} tokens "
        f"({sum(map(len, training)):,} with prompts), {len(held):,} held out"
    )

    found, model_name = list_checkpoints(out / "checkpoints"), model_fingerprint(model)
    if found:
        kept, _, hot_ids = load_checkpoint(found[-1])
        check_same_run(kept["options"], options)
        if kept.get("target", model_name) != model_name:
            raise UsageError(f"the run in {out} is of another model", "give another --out")
        shape = DrafterConfig.from_dict(kept["drafter"])
        # Any weights: the checkpoint's replace them.
        drafter = build_drafter(shape, target, hot_ids, seed=options.seed, init="random")
    elif options.start_from:
        drafter, hot_ids = trained_drafter(options, target, tell)
    else:
        drafter, hot_ids = fresh_drafter(options, target, tokenizer, training, counts, tell)
    taps = drafter.config.target_layer_ids
    teacher = Teacher(target, hot_ids)
    teacher.check(target, taps)
    cache = None
    if cache_bytes:
        where = out / "cache"
        limit = cache_bytes // group.size()
        cache = FeatureCache(where, taps, target.hidden_size, limit, group.rank(), model_name)
        whole = sum(map(len, samples)) * cache.row_bytes
        tell(
            f"feature cache: at most {cache_bytes / 1e9:.1f} GB in {where}; all of the data would "
            f"be {whole / 1e9:.1f} GB"
        )
    computer = StepComputer(
        drafter,
        FeatureSource(target, taps, teacher, cache),
        options.loss,
        hot_ids,
        target.vocab_size,
    )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error}") from None
    progress = Progress(out, options.steps, tell, log_seconds)
    trainer = Trainer(
        computer,
        training,
        held,
        options,
        out,
        hot_ids=hot_ids,
        group=group,
        save_dtype=save_dtype,
        on_step=progress.step if first else _silent,
        on_validation=progress.validation if first else _silent,
        on_message=tell,
    )
    trainer.state.target = model_name
    if trainer.resume():
        tell(f"resuming at step {trainer.state.step}, pass {trainer.state.epoch + 1}")
    else:
        (out / "recipe.json").write_text(json.dumps(options.to_dict(), indent=2) + "\n")
        tell(
            f"drafter of {parameter_count(drafter):,} trainable parameters, "
            f"taps {', '.join(map(str, taps))}, mask token {drafter.config.mask_token_id}"
        )
    state = trainer.run()
    tell(f"peak memory {mx.get_peak_memory() / 1e9:.1f} GB")
    if first:
        progress.finish(state)
    return state


def fresh_drafter(
    options: TrainOptions,
    target: Target,
    tokenizer: Any,
    samples: Sequence[data.Sample],
    counts: np.ndarray,
    tell: Callable[[str], None],
) -> tuple[Drafter, np.ndarray | None]:
    """A drafter with first weights as ``options.init`` says, and its hot vocabulary."""
    hot_ids = None
    if options.draft_vocab is not None and options.draft_vocab < target.vocab_size:
        always = sorted(getattr(tokenizer, "eos_token_ids", None) or [])
        hot_ids, covered = vocab.hot_vocabulary(counts, options.draft_vocab, always)
        tell(f"hot vocabulary: {len(hot_ids):,} ids cover {covered:.2%} of the answers' tokens")
    shape = new_config(
        target,
        layers=options.layers,
        taps=options.taps or spread_taps(target.num_layers, options.tap_count),
        block=options.block,
        head=options.head,
        rank=options.rank,
        mask_token_id=choose_mask_token(tokenizer, counts, target.vocab_size),
        draft_vocab_size=None if hot_ids is None else len(hot_ids),
        attention_bias=options.init == "recency",
    )
    drafter = build_drafter(
        shape,
        target,
        hot_ids,
        seed=options.seed,
        init=options.init,
        sample=sample_of(samples),
        factors=first_factors(options, samples, target.vocab_size, hot_ids),
    )
    return drafter, hot_ids


def trained_drafter(
    options: TrainOptions, target: Target, tell: Callable[[str], None]
) -> tuple[Drafter, np.ndarray | None]:
    """The drafter in ``options.start_from``, in float32, and its hot vocabulary."""
    folder = Path(options.start_from or "")
    drafter = load_drafter(folder, target, dtype=mx.float32, share_with_target=True)
    if drafter.config.quantization is not None:
        raise UsageError(f"the drafter in {folder} is quantised", "start from a dense one")
    if options.shaped_like(drafter.config) != options:
        raise UsageError(f"the drafter in {folder} has another shape than was asked for")
    drafter.train()
    drafter.freeze_shared()
    tell(f"starting from the drafter in {folder}")
    ids = drafter.draft_to_target
    return drafter, None if ids is None else np.array(ids)


def sample_of(samples: Sequence[data.Sample]) -> mx.array:
    """Some of the longer samples, cut to one length: ``(B, L)``."""
    longest = sorted(samples[:512], key=len)[-12:]
    length = min(map(len, longest))
    return mx.array(np.stack([s.tokens[:length] for s in longest]))


def first_factors(
    options: TrainOptions,
    samples: Sequence[data.Sample],
    vocab_size: int,
    hot_ids: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray] | None:
    """The sequential head's first weights; None where a table alone does not make its bias."""
    if options.init == "random" or options.head == "rnn" or not options.rank:
        return None
    return bigrams.bigram_factors(samples, vocab_size, hot_ids, options.rank)


def _silent(*args: Any) -> None:
    """For the processes that do not report."""
