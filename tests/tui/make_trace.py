"""Writes realistic traces: a drafter that is surer of easy text, a scheduler that cuts, a target.

    python tests/tui/make_trace.py OUT.jsonl [--requests N] [--tokens N] [--seed N]

No model runs. The texts are given; what is made up is how the rounds went.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator
from pathlib import Path

from dspark_mlx.events import (
    CostTable,
    Event,
    Finished,
    Load,
    Loaded,
    Loading,
    Memory,
    Notice,
    Prefill,
    Queued,
    RowStep,
    StepDone,
    Token,
    to_json,
)

BLOCK = 7
TEXTS = [
    """Here is a **short answer**.

A *draft* is only worth what survives it. The scheduler multiplies the confidences
and stops where the next token costs more than it brings:

```python
def survival(confidence: list[float]) -> list[float]:
    product, out = 1.0, []
    for c in confidence:
        product *= c
        out.append(product)
    return out
```

| length | cost (ms) | expected tokens |
|-------:|----------:|----------------:|
| 1 | 21.0 | 1.00 |
| 4 | 30.9 | 3.12 |
| 8 | 56.5 | 3.98 |

1. Draft a block of tokens.
2. Verify as many as pay.
3. Keep the prefix the target agrees with, and go on from there.

That is all there is to it, and the text stays exactly the target's own.
""",
    """<think>
The user wants a comparison. Two points are enough: cost and gain.
</think>
Plain decoding reads every weight once for each token. Verification reads them once for
several tokens, so its price rises slowly while the gain depends on how well the drafter
guesses. Where the text is predictable - code, lists, quotations - drafts are long; where it
is not, the scheduler cuts early and nothing is lost.

> A cut is a decision made before the answer is known.

Final answer: it pays whenever the expected tokens a second go up.
""",
]


def pieces(text: str) -> list[str]:
    return re.findall(r"\s*[A-Za-z]{1,8}|\s*[0-9]+|\s*[^\sA-Za-z0-9]|\s+", text)


def cost(width: int, rows: int) -> float:
    """Seconds of a target step: flat to four tokens, then a staircase."""
    total = width * rows
    return 0.021 * (1.0 + 0.05 * max(0, total - 1) + (0.35 if total > 5 else 0.0))


def make(requests: int = 2, tokens: int = 400, seed: int = 1) -> Iterator[Event]:
    rng = random.Random(seed)
    widths = tuple(range(1, BLOCK + 2))
    yield Loading("load", 0, 0, "toy")
    yield Loaded(
        model="toy-1b-4bit",
        drafter="toy-dspark-b7",
        method="dspark",
        reason="a drafter for this model is registered",
        schedule="early-stop",
        block=BLOCK,
        context_limit=8192,
        weight_bytes=812_000_000,
        plain_tps=round(1 / cost(1, 1), 1),
    )
    yield CostTable(
        rows=(1, 2, 4),
        widths=widths,
        step_seconds=tuple(tuple(cost(w, r) for w in widths) for r in (1, 2, 4)),
        draft_seconds=tuple(tuple(0.002 + 0.0004 * w * r for w in widths) for r in (1, 2, 4)),
        draft_widths=widths,
        overhead_seconds=0.0012,
    )
    yield Notice("method dspark: a drafter for this model is registered")
    streams = {}
    for n in range(requests):
        text = TEXTS[n % len(TEXTS)] * (1 + tokens // 150)
        streams[f"r{n + 1}"] = _Stream(f"r{n + 1}", pieces(text)[:tokens], 40 + 17 * n)
    waiting = list(streams.values())
    for ahead, stream in enumerate(waiting):
        yield Queued(stream.id, ahead)
    clock, step, kv = 100.0, 0, 0
    running: list[_Stream] = []
    while waiting or running:
        if waiting and (not running or step >= 25 * (requests - len(waiting))):
            stream = waiting.pop(0)
            yield Prefill(stream.id, stream.prompt // 2, stream.prompt, 0)
            yield Prefill(stream.id, stream.prompt, stream.prompt, 0)
            running.append(stream)
        step += 1
        slow = 1.0 + (0.6 if 60 < step < 90 else 0.0) + rng.uniform(-0.03, 0.08)
        rows = [stream.round(rng, len(running), slow) for stream in running]
        widest = max(row.scheduled for row in rows) + 1
        predicted = cost(widest, len(rows))
        verify = predicted * slow
        draft, host = 0.0045 * len(rows), 0.0013 + rng.random() * 0.0005
        clock += verify + draft + host
        made = sum(len(row.tokens) for row in rows)
        kv = sum(stream.done + stream.prompt for stream in running) * 36_000
        round_seconds = verify + draft + host
        yield StepDone(
            step=step,
            time=round(clock, 6),
            rows=tuple(rows),
            policy="early-stop",
            round_seconds=round_seconds,
            draft_seconds=draft,
            verify_seconds=verify,
            host_seconds=host,
            predicted_seconds=predicted + draft + 0.0015,
            predicted_tps=made / (predicted + draft + 0.0015),
            tps=made / round_seconds,
            syncs=1,
            load=Load(len(running), len(waiting), slow, 1.0 + (slow - 1) / 3, 0.4, 0.3, "nominal"),
            memory=Memory(812_000_000, kv, 812_000_000 + 3 * kv),
        )
        for stream in [s for s in running if s.done >= len(s.pieces)]:
            running.remove(stream)
            yield stream.finished()


class _Stream:
    def __init__(self, request_id: str, tokens: list[str], prompt: int) -> None:
        self.id, self.pieces, self.prompt = request_id, tokens, prompt
        self.done = self.rounds = self.drafted = self.scheduled = self.accepted = 0
        self.seconds = 0.0
        self.reached, self.survived = [0] * BLOCK, [0] * BLOCK

    def round(self, rng: random.Random, rows: int, slow: float) -> RowStep:
        left = len(self.pieces) - self.done
        width = min(BLOCK, max(0, left - 1))
        mood = 0.55 + 0.42 * abs(((self.done // 23) % 5) / 4 - 0.2)
        confidence, survival, product = [], [], 1.0
        for k in range(width):
            sure = min(0.99, max(0.05, mood * (1 - 0.035 * k) + rng.uniform(-0.15, 0.12)))
            confidence.append(round(sure, 4))
            product *= sure
            survival.append(round(product, 4))
        curve, best, gain = [1 / (cost(1, rows) * slow + 0.006)], 0, 1.0
        for k in range(width):
            gain += survival[k]
            curve.append(gain / (cost(k + 2, rows) * slow + 0.006))
            if curve[k + 1] > curve[best]:
                best = k + 1
        agree = 0
        while agree < width and rng.random() < confidence[agree] * 0.97:
            agree += 1
        kept = min(best, agree)
        true = self.pieces[self.done : self.done + width]
        wrong = [" the", " a", ",", " and", " of"]
        texts = [t if k < agree else wrong[(self.done + k) % 5] for k, t in enumerate(true)]
        tokens = [
            Token(
                hash_id(self.pieces[self.done + k]),
                self.pieces[self.done + k],
                "draft",
                confidence[k],
                survival[k],
            )
            for k in range(kept)
        ]
        tokens.append(
            Token(hash_id(self.pieces[self.done + kept]), self.pieces[self.done + kept], "target")
        )
        more = min(2, width - best)
        if more and best < width:
            brings = sum(survival[best : best + more])
            price = (cost(best + 1 + more, rows) - cost(best + 1, rows)) * slow * 1000
            reason = (
                f"verifying {more} more would cost {price:.1f} ms for {brings:.2f} expected tokens"
            )
        else:
            reason = "the whole draft pays"
        row = RowStep(
            self.id,
            self.prompt + self.done,
            "dspark",
            tuple(map(hash_id, texts)),
            tuple(texts),
            tuple(confidence),
            tuple(survival),
            best,
            kept,
            tuple(tokens),
            reason,
            tuple(curve),
            True,
        )
        self.done += len(tokens)
        self.rounds += 1
        self.drafted += width
        self.scheduled += best
        self.accepted += kept
        for k in range(best):
            self.reached[k] += 1
            self.survived[k] += k < kept
        self.seconds += cost(best + 1, rows) * slow + 0.006
        return row

    def finished(self) -> Finished:
        return Finished(
            self.id,
            "stop",
            self.prompt,
            0,
            self.done,
            0.12,
            0.15,
            self.seconds,
            self.rounds,
            self.drafted,
            self.scheduled,
            self.accepted,
            tuple(self.reached),
            tuple(self.survived),
            "dspark",
            7,
        )


def hash_id(text: str) -> int:
    return sum(ord(c) * (i + 3) for i, c in enumerate(text)) % 32000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    lines = [to_json(event) for event in make(args.requests, args.tokens, args.seed)]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
