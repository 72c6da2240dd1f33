"""What every proposer with a network owes the engine, as checks that take the proposer.

``make`` returns a fresh proposer of one and the same network for a toy target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from decoding import Ran, make_engine, plain_text, request, run, run_one, toy_target, upto_eos
from tables import chi_square
from toys import ToyTokenizer, prompt

from dspark_mlx.draft import Draft, DraftRow
from dspark_mlx.draft.copying import CopyFirst
from dspark_mlx.events import StepDone
from dspark_mlx.model.sampling import probabilities
from dspark_mlx.model.target import Target
from dspark_mlx.request import Cuts, SamplingParams

Make = Callable[[], Any]
COUNT = 30
POLICIES = ("fixed", "threshold", "auto", "lagged", "early-stop")


def taught(proposer: Any, texts: Sequence[Sequence[int]], rate: float = 0.7, seed: int = 0) -> Any:
    """``proposer``, with each drafted token replaced by the right one with probability ``rate``.

    ``texts`` are whole texts, told apart by their anchor's place. So a network with
    random weights sees every kind of acceptance.
    """
    rng = np.random.default_rng(seed)
    propose = proposer.propose

    def better(rows: Sequence[DraftRow]) -> Draft:
        draft = propose(rows)
        tokens = np.array(draft.tokens)
        for r, row in enumerate(rows):
            for text in texts:
                if row.position <= len(text) and text[row.position - 1] == row.anchor:
                    right = text[row.position :][: tokens.shape[1]]
                    chosen = rng.random(len(right)) < rate
                    tokens[r, : len(right)][chosen] = np.array(right, dtype=np.int32)[chosen]
                    break
        return replace(draft, tokens=mx.array(tokens))

    proposer.propose = better
    return proposer


def tensors(path: Path) -> dict[str, Any]:
    """What a safetensors file holds."""
    found: Any = mx.load(str(path))
    return dict(found)


def whole_text(kind: str, length: int = 12, seed: int = 0, count: int = COUNT) -> list[int]:
    tokens = prompt(length, seed)
    return [*tokens, *plain_text(kind, tuple(tokens), count)]


def lossless_greedy(kind: str, make: Make, policies: Sequence[str] = POLICIES) -> None:
    """One row, every schedule: the target's own text, of drafts that are right now and then."""
    target, text = toy_target(kind), whole_text(kind)
    for policy in policies:
        proposer = taught(make(), [text])
        cuts = Cuts(p_min=0.05) if policy == "threshold" else Cuts()
        engine = make_engine(target, [proposer], policy=policy)
        ran = run_one(engine, request(max_tokens=COUNT, ignore_eos=True, cuts=cuts))
        assert ran.tokens == text[12:], policy
        if policy == "fixed":
            assert ran.finished is not None
            assert 0 < ran.finished.accepted < ran.finished.scheduled


def ends(kind: str, make: Make) -> None:
    """A reply that may end at any offset of a draft: by its length, a stop string, its text's end.

    Without a look a round waits for the device once.
    """
    target, text = toy_target(kind), whole_text(kind)
    tokenizer = ToyTokenizer()
    for most in range(1, 9):
        engine = make_engine(target, [taught(make(), [text])])
        ran = run_one(engine, request(max_tokens=most, ignore_eos=True), each=_one_sync)
        assert ran.tokens == text[12 : 12 + most] and ran.reason == "length"
        if text[12 + most - 1] > 1:
            stop = tokenizer.decode(text[12 : 12 + most])
            engine = make_engine(target, [taught(make(), [text])])
            ran = run_one(engine, request(max_tokens=COUNT, ignore_eos=True, stop=(stop,)))
            assert ran.reason == "stop" and ran.text == ""
    ran = run_one(make_engine(target, [taught(make(), [text])]), request(max_tokens=COUNT))
    assert ran.tokens == upto_eos(text[12:])


def _one_sync(engine: Any, events: Sequence[Any]) -> None:
    assert all(event.syncs == 1 for event in events if isinstance(event, StepDone))


def ragged_rows_equal_each_alone(kind: str, make: Make, policy: str = "fixed") -> None:
    """Rows of other lengths, cuts, ends and methods in one batch, with copies in front."""
    target = toy_target(kind)
    lengths = [1, 14, 23, 32]
    counts = [COUNT - 5 * i for i in range(4)]
    texts = [whole_text(kind, n, i, counts[i]) for i, n in enumerate(lengths)]
    proposer = CopyFirst(taught(make(), texts), 6)
    engine = make_engine(target, [proposer], policy=policy, max_rows=4, prefill_chunk=5)
    cuts = [Cuts(), Cuts(draft_length=1), Cuts(draft_length=2), Cuts(p_min=0.02)]
    asked = [
        request(str(i), n, i, max_tokens=counts[i], ignore_eos=True, cuts=cuts[i])
        for i, n in enumerate(lengths)
    ]
    later = {3: [request("late", 30, 9, max_tokens=12, ignore_eos=True, method="none")]}
    ran: dict[str, Ran] = run(engine, *asked, later=later)
    for i, n in enumerate(lengths):
        assert ran[str(i)].tokens == texts[i][n:]
    assert tuple(ran["late"].tokens) == plain_text(kind, tuple(prompt(30, 9)), 12)


def features(target: Target, text: Sequence[int], taps: Sequence[int]) -> mx.array:
    found = target.forward(mx.array([list(text)]), target.make_rows(), taps)[1]
    assert found is not None
    return found


def new_row(proposer: Any, target: Target, text: Sequence[int]) -> Any:
    row = proposer.new_row()
    if text:
        given = features(target, text, proposer.spec.taps)
        mx.eval(proposer.prefill(row, text, given))
    return row


def fresh_row(kind: str, make: Make, width: int, accepted: int) -> None:
    """Fresh-row invariant: after any rounds the next draft is that of a row newly prefilled.

    Two rows go through drafted, plain and drafted rounds with random tokens
    accepted; one is then taken out, trimmed, extended and put back.
    """
    target = toy_target(kind)
    proposer = make()
    taps, block = proposer.spec.taps, proposer.spec.block
    texts = [prompt(15), prompt(2, 4)]
    for text in texts:
        proposer.extend(new_row(proposer, target, text[:-1]))
    rng = np.random.default_rng(width)
    for number in range(4):
        plain = number == 1
        widths = [0, 0] if plain else [width, block]
        stood = [min(accepted, widths[0]), min(2, widths[1])]
        if not plain:
            mx.eval(_draft(proposer, texts, widths).tokens)
        # Whatever was drafted, these are the tokens the target took: features come from them.
        context, given = [], []
        for text, n in zip(texts, stood, strict=True):
            new = [int(t) for t in rng.integers(2, 90, n + 1)]
            joined = [*text, *new]
            context.append(joined[len(text) - 1 : len(joined) - 1])
            longest = max(widths) + 1
            padded = [*joined, *[3] * longest][: len(text) + longest - 1]
            given.append(features(target, padded, taps)[:, len(text) - 1 :])
            text += new
        mx.eval(proposer.append_features(mx.concatenate(given)))
        proposer.commit(context, widths, stood)
        _same_as_fresh(make, proposer, target, texts)
    taken = proposer.extract(0)
    assert proposer.row_length(taken) == len(texts[0]) - 1
    proposer.filter([1])
    cut = len(texts[0]) - 1
    more = features(target, texts[0], taps)[:, cut:]
    mx.eval(proposer.prefill(taken, texts[0][cut:], more))
    texts[0] = [*texts[0], 7]
    proposer.extend(taken)
    texts.reverse()
    _same_as_fresh(make, proposer, target, texts)


def _draft(proposer: Any, texts: Sequence[list[int]], widths: Sequence[int]) -> Draft:
    rows = [
        DraftRow(text[-1], len(text), SamplingParams(), w)
        for text, w in zip(texts, widths, strict=True)
    ]
    draft: Any = proposer.propose(rows)
    return draft


def _same_as_fresh(make: Make, proposer: Any, target: Target, texts: Sequence[list[int]]) -> None:
    """The next draft of a copy of each row equals a new row's: peaks to 1e-3, tokens equal."""
    ours, theirs = make(), make()
    for r, text in enumerate(texts):
        ours.extend(proposer.extract(r))
        theirs.extend(new_row(theirs, target, text[:-1]))
    widths = [ours.spec.block] * len(texts)
    a, b = _draft(ours, texts, widths), _draft(theirs, texts, widths)
    assert a.token_rows() == b.token_rows()
    assert a.peaks is not None and b.peaks is not None
    assert float(mx.abs(a.peaks - b.peaks).max()) < 1e-3


def non_anticipating(kind: str, make: Make) -> None:
    """A confidence depends on the tokens before its own only, with independent drafts."""
    target, text = toy_target(kind), prompt(12)
    proposer = make()
    block = proposer.spec.block
    drafts = []
    for seed in range(20):
        proposer.filter([])
        proposer.extend(new_row(proposer, target, text[:-1]))
        params = SamplingParams(temperature=1.0, seed=seed, draft_sampling="probabilistic")
        draft = proposer.propose([DraftRow(text[-1], len(text), params, block)])
        assert draft.q[0] is not None
        assert np.array(draft.q[0]).sum(-1) == pytest.approx(1.0, abs=1e-5)
        assert float(mx.take_along_axis(draft.q[0], draft.tokens[0][:, None], axis=1).min()) > 0
        drafts.append((draft.token_rows()[0], draft.confidence_rows()[0]))
    for tokens, confidence in drafts:
        for others, theirs in drafts:
            shared = next((k for k in range(block) if tokens[k] != others[k]), block)
            same = min(shared + 1, block)
            assert confidence[:same] == pytest.approx(theirs[:same], abs=1e-6)


def lossless_sampling(kind: str, make: Make, draft_sampling: Any = "probabilistic") -> None:
    """The law of the second token of a reply, which is the first that may be a drafted one.

    With coupled and greedy drafts a seed gives the very text of plain decoding.
    """
    target, tokens = toy_target(kind), tuple(prompt(9))
    if draft_sampling != "probabilistic":
        params = SamplingParams(temperature=0.8, seed=4, draft_sampling=draft_sampling)
        ask = request(max_tokens=COUNT, ignore_eos=True, sampling=params)
        plain = run_one(make_engine(target), replace(ask, method="none"))
        ran = run_one(make_engine(target, [make()]), ask)
        assert ran.tokens == plain.tokens
        return
    wanted = SamplingParams(temperature=0.7, top_k=6, draft_sampling="probabilistic")
    replies, rows = 200, 100
    seen = np.zeros(target.vocab_size)
    for first in range(0, replies, rows):
        asked = [
            request(
                str(seed),
                tokens=tokens,
                max_tokens=2,
                ignore_eos=True,
                sampling=replace(wanted, seed=104729 * seed),
            )
            for seed in range(first, first + rows)
        ]
        engine = make_engine(target, [make()], max_rows=rows)
        for ran in run(engine, *asked).values():
            seen[ran.tokens[1]] += 1
    law = np.array(probabilities(target.model(mx.array([tokens]))[0, -1], wanted))
    second = np.zeros_like(law, dtype=np.float64)
    for token in np.flatnonzero(law):
        logits = target.model(mx.array([[*tokens, int(token)]]))[0, -1]
        second += law[token] * np.array(probabilities(logits, wanted))
    statistic, bound = chi_square(seen, replies * second / second.sum())
    assert statistic < bound
