"""An independent small model as the drafter: always the target's own text, whatever it drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from decoding import Ran, make_engine, plain_text, request, run, run_one, toy_target
from mlx.utils import tree_map
from toys import MODELS, ToyTokenizer, prompt

from dspark_mlx.draft import DraftRow
from dspark_mlx.draft.copying import CopyFirst
from dspark_mlx.draft.draft_model import MOST_OWED, DraftModelProposer, check_vocabulary
from dspark_mlx.errors import PairingError
from dspark_mlx.model.target import Target
from dspark_mlx.request import Cuts, SamplingParams

COUNT = 40


def noisy(kind: str, noise: float) -> Target:
    """The target's own model with noise on its weights: right now and then."""
    model = MODELS[kind](seed=0)
    mx.random.seed(3)
    model.update(
        tree_map(lambda w: w + noise * w.std() * mx.random.normal(w.shape), model.parameters())
    )
    target = Target(model)
    target.check()
    return target


def drafter(kind: str, noise: float = 0.0, block: int = 5) -> DraftModelProposer:
    model = toy_target(kind) if noise == 0.0 else noisy(kind, noise)
    return DraftModelProposer(model, toy_target(kind).vocab_size, block)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("noise", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("policy", ["fixed", "auto", "lagged", "early-stop"])
def test_lossless_greedy(kind: str, noise: float, policy: str) -> None:
    engine = make_engine(toy_target(kind), [drafter(kind, noise)], policy=policy)
    ran = run_one(engine, request(max_tokens=COUNT, ignore_eos=True))
    assert tuple(ran.tokens) == plain_text(kind, tuple(prompt(12)), COUNT)


def test_the_target_as_its_own_drafter_is_always_right() -> None:
    """So every round is a full acceptance, after which the last drafted token is owed."""
    ran = run_one(
        make_engine(toy_target("llama"), [drafter("llama")], pipelined=False),
        request(max_tokens=COUNT, ignore_eos=True),
    )
    assert all(row.accepted == row.scheduled for row in ran.rounds)
    assert len(ran.rounds) == -(-COUNT // 6)


def test_ragged_rows_together_equal_each_alone() -> None:
    """Rows of other lengths, acceptances, cuts and methods; copies in front of the drafter."""
    proposer = CopyFirst(drafter("llama", 0.1), 6)
    engine = make_engine(toy_target("llama"), [proposer], max_rows=4, prefill_chunk=5)
    cuts = [Cuts(), Cuts(draft_length=1), Cuts(draft_length=3), Cuts(p_min=0.4)]
    asked = [
        request(str(i), 5 + 9 * i, i, max_tokens=COUNT - 7 * i, ignore_eos=True, cuts=cuts[i])
        for i in range(4)
    ]
    later = {3: [request("late", 30, 9, max_tokens=20, ignore_eos=True, method="none")]}
    ran: dict[str, Ran] = run(engine, *asked, later=later)
    for i in range(4):
        own = plain_text("llama", tuple(prompt(5 + 9 * i, i)), COUNT - 7 * i)
        assert tuple(ran[str(i)].tokens) == own
    assert tuple(ran["late"].tokens) == plain_text("llama", tuple(prompt(30, 9)), 20)


def row_of(proposer: DraftModelProposer, text: list[int]) -> Any:
    row = proposer.new_row()
    mx.eval(proposer.prefill(row, text, None))
    return row


@pytest.mark.parametrize("accepted", [0, 1, 3, 5])
@pytest.mark.parametrize("width", [1, 3, 5])
def test_a_fresh_row_drafts_the_same(width: int, accepted: int) -> None:
    """Fresh-row invariant: after any round the next draft is that of a row newly prefilled."""
    text, other = prompt(15), prompt(9, 4)
    proposer = drafter("llama", 0.3)
    proposer.extend(row_of(proposer, text[:-1]))
    proposer.extend(row_of(proposer, other[:-1]))
    anchors = [text[-1], other[-1]]
    for _ in range(3):
        rows = [
            DraftRow(a, len(t), SamplingParams(), w)
            for a, t, w in zip(anchors, (text, other), (width, 5), strict=True)
        ]
        drafted = proposer.propose(rows).token_rows()
        stood = [drafted[0][:accepted], drafted[1][:2]]
        mx.eval(proposer.append_features(None))
        context = [[a, *tokens] for a, tokens in zip(anchors, stood, strict=True)]
        proposer.commit(context, [width, 5], [len(tokens) for tokens in stood])
        # The token behind the accepted ones is the target's own.
        for t, tokens in zip((text, other), stood, strict=True):
            t += [*tokens, 2 + len(t) % 7]
        anchors = [text[-1], other[-1]]
    again = [
        DraftRow(a, len(t), SamplingParams(), 4)
        for a, t in zip(anchors, (text, other), strict=True)
    ]
    ours = proposer.propose(again)
    fresh = drafter("llama", 0.3)
    for t in (text, other):
        fresh.extend(row_of(fresh, t[:-1]))
    fresh._peaks = proposer._peaks  # what was learned of acceptance belongs to no row
    theirs = fresh.propose(again)
    assert ours.token_rows() == theirs.token_rows()
    for a, b in zip(ours.confidence_rows(), theirs.confidence_rows(), strict=True):
        assert a == pytest.approx(b, abs=1e-4)


def test_plain_rounds_are_fed_now_and_then_and_a_row_taken_out_goes_on() -> None:
    proposer = drafter("llama", 0.3)
    text = prompt(8)
    proposer.extend(row_of(proposer, text[:-1]))
    for n in range(2 * MOST_OWED):
        mx.eval(proposer.append_features(None))
        proposer.commit([[text[-1]]], [0], [0])
        text.append(2 + n % 9)
        assert len(proposer._owed[0]) <= MOST_OWED
    row = proposer.extract(0)
    assert proposer.row_length(row) == len(text) - 1
    proposer.trim_row(row, len(text) - 20)
    assert proposer.row_length(row) == len(text) - 20
    proposer.filter([])
    mx.eval(proposer.prefill(row, text[len(text) - 20 : -1], None))
    proposer.extend(row)
    ask = [DraftRow(text[-1], len(text), SamplingParams(), 5)]
    fresh = drafter("llama", 0.3)
    fresh.extend(row_of(fresh, text[:-1]))
    assert proposer.propose(ask).token_rows() == fresh.propose(ask).token_rows()


def test_the_next_turn_prefills_what_is_new_in_both_models() -> None:
    engine = make_engine(toy_target("llama"), [drafter("llama", 0.1)], prefill_chunk=8)
    first = run_one(engine, request("a", 40, max_tokens=12, ignore_eos=True))
    turn = (*prompt(40), *first.tokens, *prompt(6, 3))
    ran = run_one(engine, request("b", tokens=turn, max_tokens=12, ignore_eos=True))
    assert ran.finished is not None and ran.finished.reused_tokens >= 51
    assert tuple(ran.tokens) == plain_text("llama", turn, 12)


def test_the_prompt_is_read_in_chunks_by_both_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the target has the beginning already and the drafter has not."""
    proposer = drafter("llama")
    engine = make_engine(toy_target("llama"), [proposer], prefill_chunk=8)
    run_one(engine, request("plain", 50, max_tokens=2, ignore_eos=True, method="none"))
    read: list[int] = []
    prefill = proposer.prefill
    monkeypatch.setattr(
        proposer, "prefill", lambda row, ids, f: read.append(len(ids)) or prefill(row, ids, f)
    )
    ran = run_one(engine, request("drafted", 50, max_tokens=12, ignore_eos=True))
    assert max(read) <= 8 and sum(read) == 49
    assert tuple(ran.tokens) == plain_text("llama", tuple(prompt(50)), 12)


def test_sampled_text_is_that_of_the_seed() -> None:
    for draft_sampling in ("greedy", "coupled"):
        sampling = SamplingParams(temperature=0.8, seed=4, draft_sampling=draft_sampling)
        ask = request(max_tokens=COUNT, ignore_eos=True, sampling=sampling)
        plain = run_one(make_engine(toy_target("llama")), replace(ask, method="none"))
        ran = run_one(make_engine(toy_target("llama"), [drafter("llama", 0.2)]), ask)
        assert ran.tokens == plain.tokens


class Vocabulary(ToyTokenizer):
    def __init__(self, words: list[str]) -> None:
        self._words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: id for id, word in enumerate(self._words)}


def test_another_vocabulary_is_refused_by_the_first_id_that_differs() -> None:
    ours = Vocabulary(["a", "b", "c"])
    check_vocabulary(ours, Vocabulary(["a", "b", "c", "padding"]), (3, 4))
    with pytest.raises(PairingError, match="id 1 is 'x' there and 'b' in the target"):
        check_vocabulary(ours, Vocabulary(["a", "x", "y"]), (3, 3))
