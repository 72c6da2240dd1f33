"""The target's own answers to prompts: what a drafter is trained on.

Appends to a jsonl file and goes on where an earlier run stopped. A prompt with
further turns becomes one sample a turn, each with the answers before it, which
also makes the long contexts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..errors import UsageError
from ..events import Finished, StepDone
from ..request import Request, SamplingParams

if TYPE_CHECKING:
    from ..engine import Engine
    from ..training.data import Record

EVERY_SECONDS = 10.0  # between lines of progress


@dataclass
class _Job:
    """One conversation on its way: ``turn`` counts the answers already given."""

    record: Record
    temperature: float
    messages: list[dict[str, str]]
    turn: int = 0
    tokens: list[int] = field(default_factory=list)


def answer(
    engine: Engine,
    records: Sequence[Record],
    out: Path,
    *,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Answer every record in ``out``, temperatures in turn; returns the tokens made now.

    Interrupting loses only the answers being made. Raises UsageError when
    ``out`` cannot be written.
    """
    have = _done(out)
    waiting = [
        _Job(record, temperatures[i % len(temperatures)], list(record.messages))
        for i, record in enumerate(records)
        if record.key not in have
    ]
    total = len(waiting)
    if have:
        say(f"{len(records) - total} of {len(records)} prompts are answered already")
    begin = said = time.monotonic()
    made = finished = 0
    jobs: dict[str, _Job] = {}
    with _append(out) as file:
        while waiting or jobs:
            while waiting and len(jobs) < engine.max_rows:
                job = waiting.pop(0)
                jobs[_submit(engine, job, max_tokens, seed)] = job
            for event in engine.step():
                if isinstance(event, StepDone):
                    for row in event.rows:
                        ids = [token.id for token in row.tokens]
                        jobs[row.request_id].tokens += ids
                        made += len(ids)
                elif isinstance(event, Finished):
                    job = jobs.pop(event.request_id)
                    if event.reason == "error":
                        say(f"left out a prompt: {event.message}")
                    elif not _write(file, job, event, engine.tokenizer):
                        jobs[_submit(engine, job, max_tokens, seed)] = job
                        continue
                    finished += 1
            if time.monotonic() - said > EVERY_SECONDS:
                said = time.monotonic()
                say(_progress(finished, total, made, said - begin))
    return made


def _progress(finished: int, total: int, made: int, seconds: float) -> str:
    left = (total - finished) * seconds / finished if finished else 0.0
    end = f", {left / 60:.0f} min left" if finished else ""
    return (
        f"answers: {finished} of {total} prompts, {made:,} tokens, {made / seconds:.0f} tok/s{end}"
    )


def _submit(engine: Engine, job: _Job, max_tokens: int, seed: int) -> str:
    name = f"{job.record.key}/{job.turn}"
    engine.submit(
        Request(
            id=name,
            messages=tuple(job.messages),
            max_tokens=max_tokens,
            sampling=SamplingParams(
                temperature=job.temperature, seed=(int(job.record.key[:8], 16) + seed) % 2**31
            ),
        )
    )
    return name


def _write(file: TextIO, job: _Job, event: Finished, tokenizer: Any) -> bool:
    """Write the answer; False when the conversation has a further turn, now in ``job``."""
    ends = set(tokenizer.eos_token_ids)
    body = [t for t in job.tokens if t not in ends]
    text = tokenizer.decode(body)
    ids = body
    if event.reason == "stop":
        ids = [*body, job.tokens[-1] if job.tokens[-1:] and job.tokens[-1] in ends else min(ends)]
    last = job.turn >= len(job.record.later_turns) or event.reason != "stop"
    row = {
        "messages": job.messages,
        "response": text,
        "response_tokens": ids,
        "temperature": job.temperature,
        "domain": job.record.domain,
        "finish": event.reason,
        "last": last,
    }
    file.write(json.dumps(row) + "\n")
    file.flush()
    if last:
        return True
    job.messages = [
        *job.messages,
        {"role": "assistant", "content": text},
        {"role": "user", "content": job.record.later_turns[job.turn]},
    ]
    job.turn, job.tokens = job.turn + 1, []
    return False


def _done(out: Path) -> set[str]:
    """Keys of the prompts whose last answer is in ``out``; half a line at its end is cut off."""
    from ..training.data import parse

    if not out.exists():
        return set()
    keys, whole = set(), 0
    data = out.read_bytes()
    for line in data.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        whole += len(line)
        row = json.loads(line)
        if row.get("last", True):
            keys.add(parse(line.decode(), str(out)).key)
    if whole < len(data):
        with out.open("r+b") as file:
            file.truncate(whole)
    return keys


def _append(out: Path) -> TextIO:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return out.open("a", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None
