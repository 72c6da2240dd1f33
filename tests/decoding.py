"""Running whole engines in tests: every step checked, every reply collected.

``run`` asserts what must hold after any step of any engine (rows and caches in
step with the replies, counts in order, origins right), so each test that uses
it checks those as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from toys import EOS, MODELS, VOCAB, TextRow, ToyTokenizer, prompt

from dspark_mlx.draft import Draft, DraftRow, Proposer, ProposerSpec
from dspark_mlx.draft.copying import CopyFirst
from dspark_mlx.draft.dspark.calibration import DraftCalibration, Scale
from dspark_mlx.draft.dspark.config import DrafterConfig
from dspark_mlx.draft.dspark.network import Drafter
from dspark_mlx.draft.dspark.pairing import attach_target
from dspark_mlx.draft.dspark.proposer import DSparkProposer
from dspark_mlx.draft.lookup import LookupProposer
from dspark_mlx.engine.engine import Engine
from dspark_mlx.events import Event, Finished, Prefill, Queued, StepDone, Token
from dspark_mlx.model.cache import RowsKV
from dspark_mlx.model.target import Target
from dspark_mlx.request import Request
from dspark_mlx.schedule import make_policy
from dspark_mlx.schedule.policy import Outcome, Plan, Policy, RowView, Schedule


@functools.cache
def toy_target(
    kind: str = "llama", seed: int = 0, kv_bits: int | None = None, dtype: str = "float32"
) -> Target:
    """A checked target; shared, since targets keep no state of any request."""
    model = MODELS[kind](seed=seed)
    if dtype != "float32":
        model.set_dtype(getattr(mx, dtype))
    target = Target(model, kv_bits=kv_bits, kv_group_size=32)
    target.check((-1, 0, 1))
    return target


@functools.cache
def plain_text(
    kind: str,
    tokens: tuple[int, ...],
    count: int,
    seed: int = 0,
    kv_bits: int | None = None,
    dtype: str = "float32",
) -> tuple[int, ...]:
    """mlx-lm's own greedy continuation of a toy, EOS or not, on mlx-lm's own cache."""
    options: dict[str, Any] = {}
    if kv_bits is not None:
        options = {"kv_bits": kv_bits, "kv_group_size": 32}
    model = toy_target(kind, seed, None, dtype).model
    steps = generate_step(mx.array(tokens), model, max_tokens=count, **options)
    return tuple(token for token, _ in steps)


def upto_eos(tokens: Sequence[int]) -> list[int]:
    """``tokens`` up to and with the first end-of-text id."""
    tokens = list(tokens)
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


# -- proposers ------------------------------------------------------------------------------


class ScriptProposer:
    """Drafts from given texts, each token spoiled with probability ``noise``.

    ``scripts`` are whole texts (prompt and reply); a row follows the one that
    agrees with it so far, else nothing right is drafted. Cheap at any length.
    """

    nbytes = 0

    def __init__(
        self,
        scripts: Sequence[Sequence[int]],
        block: int,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.scripts = [list(s) for s in scripts]
        self.spec = ProposerSpec(name="script", block=block)
        self.noise = noise
        self.rng = np.random.default_rng(seed)
        self._rows: list[TextRow] = []

    def new_row(self) -> TextRow:
        return TextRow()

    def prefill(self, row: TextRow, tokens: Sequence[int], features: Any) -> list[mx.array]:
        row.extend(tokens)
        return []

    def row_length(self, row: TextRow) -> int:
        return len(row)

    def trim_row(self, row: TextRow, length: int) -> None:
        del row[length:]

    def extend(self, row: TextRow) -> None:
        self._rows.append(row)

    def filter(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[r] for r in rows]

    def extract(self, row: int) -> TextRow:
        return TextRow(self._rows[row])

    def peek(self, anchors: Sequence[int]) -> list[tuple[float, ...] | None]:
        return [None] * len(anchors)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        width = max(row.width for row in rows)
        drafts, confidence = [], []
        for text, row in zip(self._rows, rows, strict=True):
            assert row.position == len(text) + 1, "the context is not where the row is"
            so_far = [*text, row.anchor]
            right = next((s[len(so_far) :] for s in self.scripts if s[: len(so_far)] == so_far), [])
            right = [*right, *[2] * width][:width]
            spoil = self.rng.random(width) < self.noise
            drafts.append([_other(t) if s else t for t, s in zip(right, spoil, strict=True)])
            confidence.append([0.2 if s else 0.9 for s in spoil])
        return Draft(
            tokens=mx.array(drafts, dtype=mx.int32).reshape(len(rows), width),
            counts=tuple(row.width for row in rows),
            confidence=mx.array(confidence, dtype=mx.float32).reshape(len(rows), width),
            q=(None,) * len(rows),
        )

    def append_features(self, features: Any) -> list[mx.array]:
        return []

    def commit(
        self,
        context: Sequence[Sequence[int]],
        verified: Sequence[int],
        accepted: Sequence[int],
    ) -> None:
        for text, tokens in zip(self._rows, context, strict=True):
            text.extend(tokens)


def _other(token: int) -> int:
    return (token + 1 - 2) % (VOCAB - 2) + 2


HEADS = ("vanilla", "gated", "rnn", None)


def toy_drafter(
    target: Target,
    *,
    head: str | None = "vanilla",
    block: int = 5,
    taps: tuple[int, ...] = (-1, 0, 1),
    reduced: bool = False,
    confidence: bool = True,
    calibrated: bool = True,
    lessons: Sequence[Sequence[int]] = (),
    seed: int = 0,
) -> Drafter:
    """A drafter made for a toy target: random, but with a Markov head that was taught bigrams.

    ``lessons`` are texts whose bigrams the head knows, but for some, so that
    drafts of every kind are partly accepted. ``reduced`` leaves every tenth id
    out of the draft vocabulary.
    """
    vocab = target.vocab_size
    ids = [i for i in range(vocab) if i % 10 != 9] if reduced else list(range(vocab))
    config = DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=vocab,
        draft_vocab_size=len(ids) if reduced else None,
        block_size=block,
        mask_token_id=0,
        target_layer_ids=taps,
        markov_head_type=head,
        markov_rank=vocab if head else 0,
        enable_confidence_head=confidence,
        confidence_head_with_markov=confidence and head is not None,
    )
    mx.random.seed(seed)
    drafter = Drafter(config)
    if reduced:
        drafter.set_draft_vocabulary(mx.array(ids))
    attach_target(drafter, target)
    if head is not None:
        _teach_bigrams(drafter, ids, lessons, seed)
    if calibrated:
        scale = Scale(tuple(1.0 + 0.1 * k for k in range(block)), (0.1,) * block)
        drafter.calibration = DraftCalibration(scale, scale)
    mx.eval(drafter.parameters())
    return drafter


def _teach_bigrams(
    drafter: Drafter, ids: Sequence[int], lessons: Sequence[Sequence[int]], seed: int
) -> None:
    """Make the head's bias of y after x large for the bigrams of ``lessons``."""
    rng = np.random.default_rng(seed)
    vocab = drafter.config.vocab_size
    w1, w2 = np.eye(vocab), rng.normal(0.0, 0.1, (vocab, vocab))
    for text in lessons:
        for x, y in pairwise(text):
            w2[y if rng.random() < 0.75 else _other(y), x] += 20.0
    w2 = w2[ids]
    head: Any = drafter.markov_head
    if drafter.config.markov_head_type == "gated":
        head.gate_proj.weight = head.gate_proj.weight * 0.1
        head.gate_proj.bias = mx.full(head.gate_proj.bias.shape, 4.0)  # nearly open
    if drafter.config.markov_head_type == "rnn":
        joint = np.array(head.joint_proj.weight) * 0.01
        joint[2 * vocab :, vocab : 2 * vocab] = np.eye(vocab)  # the output reads W1[x]
        head.joint_proj.weight = mx.array(joint.astype(np.float32))
    head.markov_w1.weight = mx.array(w1.astype(np.float32))
    head.markov_w2.weight = mx.array(w2.astype(np.float32))


def dspark(target: Target, **options: Any) -> DSparkProposer:
    return DSparkProposer(toy_drafter(target, **options), target.vocab_size)


class Whims:
    """A policy without reason: random widths, random lengths, random looks, plain stretches."""

    name = "whims"

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.calm = 0

    def plan(self, rows: Sequence[RowView]) -> Plan:
        if self.calm == 0 and self.rng.random() < 0.2:
            self.calm = int(self.rng.integers(1, 7))
        if self.calm:
            self.calm -= 1
            return Plan((0,) * len(rows), False)
        widths = tuple(int(self.rng.integers(0, row.cap + 1)) for row in rows)
        return Plan(widths, any(widths) and bool(self.rng.random() < 0.5))

    def schedule(
        self,
        rows: Sequence[RowView],
        drafted: Sequence[int],
        confidence: Sequence[Sequence[float]] | None,
    ) -> Schedule:
        lengths = tuple(int(self.rng.integers(0, n + 1)) for n in drafted)
        return Schedule(lengths, ("on a whim",) * len(lengths))

    def observe(self, outcome: Outcome) -> None:
        for row, n, s, a, c in zip(
            outcome.rows,
            outcome.drafted,
            outcome.scheduled,
            outcome.accepted,
            outcome.committed,
            strict=True,
        ):
            assert 0 <= a <= s <= n <= row.block
            assert 1 <= c <= a + 1 <= row.remaining


# -- engines --------------------------------------------------------------------------------


def make_engine(
    target: Target,
    proposers: Sequence[Proposer] = (),
    *,
    policy: Policy | str = "fixed",
    tokenizer: Any = None,
    **options: Any,
) -> Engine:
    """An engine that answers ``auto`` with its first proposer (none without one)."""
    options.setdefault("pipelined", True)  # as on a GPU
    options.setdefault("default_method", proposers[0].spec.name if proposers else "none")
    chosen = make_policy(policy) if isinstance(policy, str) else policy
    return Engine(target, tokenizer or ToyTokenizer(), proposers, chosen, **options)


@dataclass
class Ran:
    """One reply as its events told it."""

    tokens: list[int] = field(default_factory=list)
    parts: list[Token] = field(default_factory=list)
    text: str = ""
    rounds: list[Any] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def reason(self) -> str:
        assert self.finished is not None
        return self.finished.reason


def run(
    engine: Engine,
    *requests: Request,
    later: Mapping[int, Sequence[Request | str]] | None = None,
    each: Callable[[Engine, list[Event]], None] | None = None,
    most: int = 5000,
) -> dict[str, Ran]:
    """Run until nothing is left; ``later[n]`` are submitted (or, ids, cancelled) after step n."""
    ran: dict[str, Ran] = {}
    later = dict(later or {})
    for request in requests:
        engine.submit(request)
    for number in range(most):
        for item in later.pop(number, ()):
            if isinstance(item, str):
                engine.cancel(item)
            else:
                engine.submit(item)
        if not engine.active and not later:
            break
        events = engine.step()
        for event in events:
            collect(event, ran)
        check_state(engine)
        if each is not None:
            each(engine, events)
    assert not engine.active, "the engine did not come to an end"
    assert all(r.finished is not None for r in ran.values())
    for reply in ran.values():
        _check_counts(reply)
    return ran


def run_one(engine: Engine, request: Request, **options: Any) -> Ran:
    return run(engine, request, **options)[request.id]


def collect(event: Event, ran: dict[str, Ran]) -> None:
    """Add an event to the replies it is about, checking it on the way."""
    if isinstance(event, Queued):
        assert event.request_id not in ran
        ran[event.request_id] = Ran()
    elif isinstance(event, Prefill):
        reply = ran[event.request_id]
        assert 0 <= event.reused <= event.done <= event.total
        assert not reply.prefills or reply.prefills[-1].done <= event.done
        reply.prefills.append(event)
    elif isinstance(event, StepDone):
        assert event.rows and event.syncs >= 1
        assert event.round_seconds >= event.verify_seconds >= 0 and event.host_seconds >= 0
        assert len({row.request_id for row in event.rows}) == len(event.rows)
        for row in event.rows:
            reply = ran[row.request_id]
            assert reply.finished is None
            assert 0 <= row.accepted <= row.scheduled <= len(row.drafted)
            assert len(row.draft_texts) == len(row.drafted) == len(row.confidence)
            assert len(row.survival) == len(row.confidence)
            ids = [t.id for t in row.tokens]
            assert ids[: row.accepted] == list(row.drafted[: row.accepted])
            origins = ["draft"] * row.accepted + ["target"]
            assert [t.origin for t in row.tokens] == origins[: len(ids)]
            reply.rounds.append(row)
            reply.parts += row.tokens
            reply.tokens += ids
            reply.text += "".join(t.text for t in row.tokens)
    elif isinstance(event, Finished):
        reply = ran[event.request_id]
        assert reply.finished is None, "a reply ended twice"
        reply.finished = event
        reply.text += event.tail


def check_state(engine: Engine) -> None:
    """Every cache of every row holds exactly the tokens before the row's anchor."""
    batch = engine.batch
    if not batch.sequences:
        assert batch.rows is None
        return
    context = [len(seq.tokens) - 1 for seq in batch.sequences]
    # A plain round dispatched early has put its token into the target's caches already.
    held = [n + (engine._next is not None) for n in context]
    assert batch.rows is not None and batch.rows.lengths == held
    for layer in batch.rows.layers:
        if isinstance(layer, RowsKV):
            assert layer.lengths == held
    for proposer in batch.proposers.values():
        mine = [context[r] for r in batch.members(proposer)]
        if isinstance(proposer, CopyFirst):
            assert [len(row.tokens) for row in proposer._lookup._rows] == mine
            proposer = proposer.inner
        if isinstance(proposer, DSparkProposer):
            assert proposer._rows.lengths == mine
        elif isinstance(proposer, LookupProposer):
            assert [len(row.tokens) for row in proposer._rows] == mine
        elif isinstance(proposer, ScriptProposer):
            assert [len(row) for row in proposer._rows] == mine


def _check_counts(reply: Ran) -> None:
    done = reply.finished
    assert done is not None
    if done.generation_tokens == 0:
        assert not reply.tokens
        return
    assert done.generation_tokens == len(reply.tokens)
    assert done.rounds == len(reply.rounds)
    assert done.drafted == sum(len(row.drafted) for row in reply.rounds)
    assert done.scheduled == sum(row.scheduled for row in reply.rounds)
    assert done.accepted == sum(row.accepted for row in reply.rounds)
    assert done.accepted == sum(t.origin == "draft" for t in reply.parts)
    assert sum(done.survived) == done.accepted
    assert min(done.prompt_seconds, done.first_token_seconds, done.generation_seconds) >= 0
    for row in reply.rounds:
        assert row.position >= done.prompt_tokens


def request(id: str = "a", length: int = 12, seed: int = 0, **options: Any) -> Request:
    """A request with a random prompt (unless one is given) of a toy."""
    if not {"prompt", "messages", "tokens"} & set(options):
        options["tokens"] = tuple(prompt(length, seed))
    options.setdefault("max_tokens", 24)
    return Request(id, **options)
