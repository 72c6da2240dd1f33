"""lossless_greedy and seeds under every policy, batched, on every cost table.

Rows of different prompts, lengths and settings join and leave in mid-flight;
what each writes is what it writes alone, plainly.
"""

from __future__ import annotations

import pytest
import toys
from drafter_toys import toy_drafter

from dspark_mlx.bench.simulator.tables import tables
from dspark_mlx.draft.copying import CopyFirst
from dspark_mlx.draft.dspark.pairing import attach_target
from dspark_mlx.draft.dspark.proposer import DSparkProposer
from dspark_mlx.draft.lookup import LookupProposer
from dspark_mlx.engine.engine import Engine
from dspark_mlx.events import Finished, StepDone
from dspark_mlx.model.target import Target
from dspark_mlx.request import Cuts, Request, SamplingParams
from dspark_mlx.schedule import POLICIES, make_policy

TAPS = (-1, 0, 1)


def requests() -> list[Request]:
    """Greedy and sampled, cut and uncut, with and without a drafter, long and short."""
    hot = SamplingParams(temperature=1.0, top_p=0.95, seed=11)
    settings = [
        {"method": "auto"},
        {"method": "dspark"},
        {"method": "auto", "sampling": hot},
        {"method": "dspark", "sampling": SamplingParams(temperature=0.7, seed=3)},
        {"method": "lookup", "cuts": Cuts(draft_length=2)},
        {"method": "auto", "cuts": Cuts(p_survival_min=0.4)},
        {"method": "none", "sampling": hot},
    ]
    return [
        Request(
            f"r{i}",
            tokens=tuple(toys.prompt(4 + 9 * i, seed=i)),
            max_tokens=10 + 3 * i,
            ignore_eos=True,
            **options,  # type: ignore[arg-type]
        )
        for i, options in enumerate(settings)
    ]


def engine(target: Target, policy: str, table: str, rows: int) -> Engine:
    drafter = toy_drafter(1, target_layer_ids=TAPS, num_target_layers=2)
    attach_target(drafter, target)
    proposers = [
        toys.OracleProposer(target.model, 5, noise=0.3),
        CopyFirst(DSparkProposer(drafter, target.vocab_size), 6),
        LookupProposer(4),
    ]
    cost = tables()[table] if table else None
    made = make_policy(policy, cost=cost)
    return Engine(
        target,
        toys.ToyTokenizer(),
        proposers,
        made,
        default_method="oracle",
        max_rows=rows,
        prefill_chunk=16,
    )


def serve(engine: Engine, asked: list[Request], every: int = 2) -> dict[str, list[int]]:
    """Tokens by request; a new request arrives every few steps."""
    waiting = list(asked)
    texts: dict[str, list[int]] = {r.id: [] for r in asked}
    step = 0
    while engine.active or waiting:
        if waiting and step % every == 0:
            engine.submit(waiting.pop(0))
        for event in engine.step():
            if isinstance(event, StepDone):
                for row in event.rows:
                    texts[row.request_id] += [t.id for t in row.tokens]
            elif isinstance(event, Finished):
                assert event.reason == "length", event.message
        step += 1
    return texts


@pytest.fixture(scope="module")
def target() -> Target:
    made = toys.target("llama")
    made.check(TAPS)
    return made


@pytest.fixture(scope="module")
def alone(target: Target) -> dict[str, list[int]]:
    """Each request by itself, decoded plainly."""
    texts: dict[str, list[int]] = {}
    for request in requests():
        texts |= serve(engine(target, "off", "", 1), [request])
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("table", ["", *tables()])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_row_writes_what_it_writes_alone(
    target: Target, alone: dict[str, list[int]], policy: str, table: str
) -> None:
    assert serve(engine(target, policy, table, 4), requests()) == alone


@pytest.mark.parametrize("policy", POLICIES)
def test_independent_drafts_end_as_they_should(target: Target, policy: str) -> None:
    """Rejection sampling beside greedy rows: the greedy ones are untouched, all come to an end."""
    sampling = SamplingParams(temperature=1.0, seed=5, draft_sampling="probabilistic")
    greedy = Request("g", tokens=tuple(toys.prompt(7)), max_tokens=25, ignore_eos=True)
    hot = [
        Request(
            f"h{i}",
            tokens=tuple(toys.prompt(5, seed=i)),
            max_tokens=20,
            method="dspark",
            sampling=sampling,
            ignore_eos=True,
        )
        for i in range(3)
    ]
    texts = serve(engine(target, policy, "flat", 4), [greedy, *hot])
    assert texts["g"] == toys.plain_greedy(target.model, toys.prompt(7), 25)
    assert all(len(texts[r.id]) == 20 for r in hot)
