"""The target's own answers to prompts: what a drafter is trained on.

Appends to a jsonl file and goes on where an earlier run stopped. A prompt with
further turns becomes one sample per turn, each with the answers before it; these
are the long contexts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ..engine.engine import Engine
from ..errors import DsparkError, UsageError
from ..events import Finished, StepDone
from ..request import Request, SamplingParams
from .checkpoint import model_fingerprint
from .data import Record, parse

EVERY_SECONDS = 10.0  # between lines of progress


@dataclass
class _Job:
    """A conversation being answered; ``turn`` counts the answers already given."""

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
    """Answer every record, into ``out``, with ``temperatures`` in turn. Returns the tokens made.

    A conversation that is given twice is answered once. One that cannot be answered (its prompt
    may be too long) is named and left out. Interrupting loses only the answers being made.
    Raises UsageError when ``out`` cannot be written, is damaged or holds another model's answers.
    """
    model = model_fingerprint(engine.target.model)
    have = _Answered(out, model)
    distinct = list({record.identity: record for record in records}.values())
    waiting = [
        _Job(record, temperatures[i % len(temperatures)], list(record.messages))
        for i, record in enumerate(distinct)
        if not have.all_of(record)
    ]
    total = len(waiting)
    if total < len(distinct):
        say(f"{len(distinct) - total} of {len(distinct)} prompts are answered already")
    begin = said = time.monotonic()
    made = finished = 0
    jobs: dict[str, _Job] = {}

    def start(job: _Job) -> bool:
        """Ask for the answer to its next turn; False if the engine refuses it."""
        try:
            jobs[_submit(engine, job, max_tokens, seed)] = job
        except DsparkError as error:
            say(f"left out {_shown(job)}: {error.message}")
            return False
        return True

    with _append(out) as file:
        while waiting or jobs:
            while waiting and len(jobs) < engine.max_rows:
                finished += not start(waiting.pop(0))
            for event in engine.step():
                if isinstance(event, StepDone):
                    for step in event.rows:
                        jobs[step.request_id].tokens += [token.id for token in step.tokens]
                        made += len(step.tokens)
                elif isinstance(event, Finished):
                    job = jobs.pop(event.request_id)
                    if event.reason == "error":
                        say(f"left out {_shown(job)}: {event.message}")
                        finished += 1
                        continue
                    row = _row(job, event, engine.tokenizer)
                    more = (
                        event.reason == "stop" and _next_turn(job, row["response"]) and start(job)
                    )
                    finished += not more
                    if not have.turn_of(job.record, row["turn"]):
                        row |= {"last": not more, "target": model}
                        file.write(json.dumps(row) + "\n")
                        file.flush()
            if time.monotonic() - said > EVERY_SECONDS:
                said = time.monotonic()
                say(_progress(finished, total, made, said - begin))
    return made


def _shown(job: _Job) -> str:
    """How the conversation begins, for a person to find it by."""
    text = " ".join(job.messages[0]["content"].split())
    return f"the prompt {text[:40] + '...' if len(text) > 40 else text!r}"


def _progress(finished: int, total: int, made: int, seconds: float) -> str:
    left = (total - finished) * seconds / finished if finished else 0.0
    end = f", {left / 60:.0f} min left" if finished else ""
    return (
        f"answers: {finished} of {total} prompts, {made:,} tokens, {made / seconds:.0f} tok/s{end}"
    )


def _submit(engine: Engine, job: _Job, max_tokens: int, seed: int) -> str:
    name = f"{job.record.identity}/{job.turn}"
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


def _row(job: _Job, event: Finished, tokenizer: Any) -> dict[str, Any]:
    """The answer as a line of training data."""
    ends = set(tokenizer.eos_token_ids)
    body = [t for t in job.tokens if t not in ends]
    ids = body
    if event.reason == "stop":
        ids = [*body, job.tokens[-1] if job.tokens[-1:] and job.tokens[-1] in ends else min(ends)]
    return {
        "messages": job.messages,
        "response": tokenizer.decode(body),
        "response_tokens": ids,
        "temperature": job.temperature,
        "domain": job.record.domain,
        "finish": event.reason,
        "record": job.record.identity,
        "turn": job.turn,
    }


def _next_turn(job: _Job, answer: str) -> bool:
    """Append the answer and the user's next turn; False if there is none."""
    if job.turn >= len(job.record.later_turns):
        return False
    job.messages = [
        *job.messages,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": job.record.later_turns[job.turn]},
    ]
    job.turn, job.tokens = job.turn + 1, []
    return True


class _Answered:
    """The answers that ``out`` holds. Half a line at its end, of a killed run, is cut off."""

    def __init__(self, out: Path, model: str) -> None:
        self._turns: set[tuple[str, int]] = set()
        self._whole: set[str] = set()  # conversations whose last answer is there
        self._openings: set[str] = set()  # the same for lines that name no record, by their key
        if not out.exists():
            return
        data = out.read_bytes()
        whole = data.rfind(b"\n") + 1
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
            where = f"{out}:{number}"
            try:
                text = line.decode()
            except UnicodeDecodeError:
                raise UsageError(f"{where} is damaged", "delete that line") from None
            record = parse(text, where)
            row = json.loads(text)
            if row.get("target", model) != model:
                raise UsageError(f"{out} holds answers of another model", "give another --out")
            name, last = row.get("record"), row.get("last", True)
            if name is None and last:
                self._openings.add(record.key)
            elif name is not None:
                self._turns.add((name, row.get("turn", 0)))
                if last:
                    self._whole.add(name)
        if whole < len(data):
            with out.open("r+b") as file:
                file.truncate(whole)

    def all_of(self, record: Record) -> bool:
        return record.identity in self._whole or record.key in self._openings

    def turn_of(self, record: Record, turn: int) -> bool:
        return (record.identity, turn) in self._turns


def _append(out: Path) -> TextIO:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return out.open("a", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None
