"""The training run: batches in, a drafter folder out; stops, resumes and reports.

Everything random is drawn from (seed, pass, batch), so that a resumed run sees
what an unbroken one would have seen. Reading data, building the model and
printing are done elsewhere.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from ..draft.dspark.save import save_drafter
from .blocks import plan_batches
from .checkpoint import (
    RunState,
    TrainingError,
    check_same_run,
    fingerprint,
    flat_arrays,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    subtree,
)
from .data import TrainingSample
from .loss import Losses
from .step import MicroBatch, RunOptimizer, StepComputer, StepReport, add, prepare, share
from .train_options import TrainOptions
from .validate import Validation, validate, validation_batches


class Trainer:
    """Trains ``computer.drafter`` on ``train`` and exports to ``out`` what is best on ``held``."""

    def __init__(
        self,
        computer: StepComputer,
        train: Sequence[TrainingSample],
        held: Sequence[TrainingSample],
        options: TrainOptions,
        out: Path,
        *,
        vocab_ids: np.ndarray | None = None,
        group: Any | None = None,
        save_dtype: mx.Dtype = mx.bfloat16,
        on_step: Callable[[StepReport], None] = lambda report: None,
        on_validation: Callable[[int, Validation, bool], None] = lambda step, v, best: None,
        on_message: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.computer, self.train, self.options, self.out = computer, list(train), options, out
        self.vocab_ids, self.group, self.save_dtype = vocab_ids, group, save_dtype
        self.on_step, self.on_validation, self.on_message = on_step, on_validation, on_message
        self.drafter = computer.drafter
        self.world = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.optimizer = RunOptimizer(options)
        self.optimizer.init(self.drafter.trainable_parameters())
        self.state = RunState(data=fingerprint(self.train))
        self.held = validation_batches(
            held, options.validate_samples, options.batch_tokens, options.block, 8.0
        )
        self.lr = 0.0
        self.stop = threading.Event()
        self._ended = False  # all processes have agreed to stop
        self._plan: tuple[int, list[list[int]]] | None = None
        self._probe: MicroBatch | None = None  # a batch of the last step, to test its weights on

    # -- the run ------------------------------------------------------------------------

    def run(self) -> RunState:
        """Train until ``steps``, early stop or interruption; the last state is saved.

        Raises TrainingError when the loss is not finite.
        """
        options, state = self.options, self.state
        with self._interruptible():
            while state.step < options.steps and not self._ended:
                self.on_step(self.step())
                if state.step % options.validate_every == 0 or state.step == options.steps:
                    self.check()
                    if options.patience and state.since_best >= options.patience:
                        self.on_message(
                            f"stopping early: no new best in {state.since_best} validations"
                        )
                        break
                if state.step % options.checkpoint_every == 0:
                    self.save()
            self.save()
            if state.step and self.rank == 0 and not (self.out / "config.json").exists():
                self.export()  # stopped before the first validation
        return state

    def step(self) -> StepReport:
        """One optimiser step over ``accumulate x processes`` micro-batches."""
        begin, options, state = time.perf_counter(), self.options, self.state
        batches, place = self._next_batches(options.accumulate * self.world)
        decay = options.loss.decay
        normalizer = sum(b.weight(decay) for b in batches)
        gradient: Any = None
        sums = np.zeros(4)
        accepts = []
        self._probe = batches[self.rank]
        for batch in batches[self.rank :: self.world]:
            losses, partial = self.computer.gradient(batch, normalizer)
            gradient = add(gradient, partial)
            sums += _scalars(losses)
            accepts.append((np.array(losses.accept), batch))
        asked = float(self.stop.is_set())
        gradient, (stops, *numbers) = share(
            gradient, [asked, *sums.tolist(), *_survivors(accepts)], self.group
        )
        self._ended = stops > 0
        shared, (blocks, *alive) = numbers[: len(sums)], numbers[len(sums) :]
        if not all(map(math.isfinite, shared)):
            raise self._diverged(f"the loss at step {state.step + 1} is {shared[0]}")
        norm = self._update(gradient)
        state.step += 1
        state.epoch, state.position = place
        state.slots += sum(b.slots for b in batches)
        tokens = sum(len(s) for b in batches for s in b.samples)
        state.tokens += tokens
        seconds = time.perf_counter() - begin
        state.seconds += seconds
        by_slot = [a / blocks for a in alive]
        total, entropy, variation, confidence = shared
        return StepReport(
            step=state.step,
            loss=total,
            cross_entropy=entropy,
            total_variation=variation,
            confidence=confidence,
            accepted=1 + sum(by_slot),
            by_slot=by_slot,
            lr=self.lr,
            gradient_norm=norm,
            tokens=tokens,
            slots=sum(b.slots for b in batches),
            seconds=seconds,
            epoch=state.epoch,
        )

    def check(self) -> Validation | None:
        """Validate; export the drafter if it is the best so far, or if nothing is held out."""
        state = self.state
        if not self.held:
            if self.rank == 0:
                self.export()
            return None
        result = validate(self.computer, self.held, self.group)
        if not math.isfinite(result.loss):
            raise self._diverged(f"the held-out loss after step {state.step} is {result.loss}")
        best = result.greedy > state.best
        if best:
            state.best, state.best_step, state.since_best = result.greedy, state.step, 0
            if self.rank == 0:
                self.export()
        else:
            state.since_best += 1
        self.on_validation(state.step, result, best)
        return result

    # -- files --------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    def save(self) -> None:
        """Write a checkpoint of the whole run, in the first process."""
        if self.computer.source.cache is not None:
            self.computer.source.cache.save()
        if self.rank == 0:
            self._require_sound()
            kept = asdict(self.state) | {"options": self.options.to_dict()}
            kept["drafter"] = self.drafter.config.to_dict()
            save_checkpoint(
                self.checkpoints, self.drafter, self.optimizer.state, self.vocab_ids, kept
            )

    def export(self) -> None:
        """Write the drafter as it is now, in ``save_dtype``, into ``out``."""
        self._require_sound()
        kept = self.drafter.trainable_parameters()
        small = tree_map(lambda v: v.astype(self.save_dtype), kept)
        try:
            self.drafter.update(small)
            save_drafter(self.drafter, self.out)
        except (OSError, RuntimeError) as error:
            raise TrainingError(f"cannot save the drafter in {self.out}: {error}") from None
        finally:
            self.drafter.update(kept)

    def resume(self) -> bool:
        """Go on from the newest checkpoint in ``out``; False when there is none."""
        found = list_checkpoints(self.checkpoints)
        if not found:
            return False
        state, tensors, _ = load_checkpoint(found[-1])
        check_same_run(state["options"], self.options)
        self.drafter.update(subtree(tensors, "model"))
        self.optimizer.state = subtree(tensors, "optimizer")
        data = self.state.data
        known = {k: state[k] for k in RunState.__dataclass_fields__ if k in state}
        self.state = RunState(**{"target": self.state.target, **known})
        if self.state.data != data:
            self.on_message("the data has changed: beginning a new pass over it")
            self.state.data, self.state.epoch, self.state.position = data, self.state.epoch + 1, 0
        mx.eval(self.drafter.parameters(), self.optimizer.state)
        return True

    # -- inside -------------------------------------------------------------------------

    def _require_sound(self) -> None:
        """Raise TrainingError when the weights give no finite loss: they must not be saved.

        The loss that a step reports is the loss before its update; only this one is after it.
        """
        if self._probe is None:
            return
        features = self.computer.source.batch(self._probe.samples)
        loss: Any = self.computer.blocks(self._probe, features).losses.total.item()
        if not math.isfinite(loss):
            raise self._diverged(f"the weights after step {self.state.step} give a loss of {loss}")

    def _diverged(self, what: str) -> TrainingError:
        whole = list_checkpoints(self.checkpoints)
        how = "run again" if whole else "begin again"
        before = f": the last checkpoint, {whole[-1].stem}, is from before it" if whole else ""
        return TrainingError(what, f"{how} with a lower --lr and --muon-lr{before}")

    def _next_batches(self, count: int) -> tuple[list[MicroBatch], tuple[int, int]]:
        epoch, position = self.state.epoch, self.state.position
        options = self.options
        batches: list[MicroBatch] = []
        while len(batches) < count:
            plan = self._batches_of(epoch)
            if position >= len(plan):
                epoch, position = epoch + 1, 0
                continue
            rng = np.random.default_rng([options.seed, epoch, position, 1])
            chosen = [self.train[i] for i in plan[position]]
            batches.append(
                prepare(chosen, options.block, options.anchor_spacing, options.anchors, rng)
            )
            position += 1
        return batches, (epoch, position)

    def _batches_of(self, epoch: int) -> list[list[int]]:
        if self._plan is None or self._plan[0] != epoch:
            rng = np.random.default_rng([self.options.seed, epoch, 0])
            self._plan = epoch, plan_batches(self.train, self.options.batch_tokens, rng)
        return self._plan[1]

    def _update(self, gradient: Any) -> float:
        clip: Any = optim.clip_grad_norm
        gradient, norm = clip(gradient, self.options.clip)
        if not math.isfinite(norm.item()):
            raise self._diverged(f"the gradient at step {self.state.step + 1} is not finite")
        self.lr = self.optimizer.update(self.drafter, gradient, self.state.step)
        mx.eval(self.drafter.trainable_parameters(), self.optimizer.state)
        return float(norm.item())

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Ctrl+C and SIGTERM end the run after the current step, with everything saved."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {}

        def ask(number: int, frame: Any) -> None:
            if self.stop.is_set():
                raise KeyboardInterrupt
            self.stop.set()
            self.on_message("stopping after this step; press again to stop at once")

        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def parameter_count(drafter: nn.Module) -> int:
    return sum(v.size for v in flat_arrays(drafter.trainable_parameters()).values())


def _scalars(losses: Losses) -> np.ndarray:
    terms = (losses.total, losses.cross_entropy, losses.total_variation, losses.confidence)
    return np.array([t.item() for t in terms])


def _survivors(accepts: list[tuple[np.ndarray, MicroBatch]]) -> list[float]:
    """The number of this process's blocks, and how many are expected to survive each slot."""
    alive = []
    for accept, batch in accepts:
        valid = batch.blocks.valid
        valid = valid.reshape(-1, valid.shape[-1])
        alive.append(np.cumprod(accept * valid[valid[:, 0]], axis=-1))
    whole = np.concatenate(alive)
    return [float(len(whole)), *whole.sum(0).tolist()]
