"""What counts as training data, and what is said when it does not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from toys import VOCAB, ToyTokenizer

from dspark_mlx.errors import UsageError
from dspark_mlx.training import data
from dspark_mlx.training.new_drafter import count_ids, draft_vocabulary

TOKENIZER = ToyTokenizer()


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "is empty"),
        ("not json", ":1 is not JSON"),
        ("[1, 2]", ":1 is not a JSON object"),
        ('{"question": "x"}', ":1 has no usable prompt"),
        ('{"prompt": "x", "response_tokens": "abc"}', "response_tokens"),
        ('{"messages": [{"role": "user"}]}', "no usable prompt"),
        ('{"prompt": "x", "response": 3}', "response must be a string"),
        ('{"text": null}', ":1 has no usable prompt"),
        ('{"prompt": "\\ud800 hi"}', "surrogate"),
        ('{"text": "\\ud800 hi"}', "surrogate"),
        ("[" * 100_000, ":1 is not JSON"),
    ],
)
def test_bad_lines_are_named_with_file_and_line(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path / "bad.jsonl", line)
    with pytest.raises(UsageError) as caught:
        data.read_records([path])
    assert words in str(caught.value) and "bad.jsonl" in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "\\ud83d\\ude00"}\n')
    assert [r.messages[0]["content"] for r in data.read_records([path])] == ["a", "\U0001f600"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.jsonl"):
        data.read_records([tmp_path / "absent.jsonl"])


def test_the_half_line_of_a_file_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "growing.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n{"prompt": "c", "respon')
    assert len(data.read_records([path])) == 1


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "Hi", "response": "Hello"},
        {"messages": [{"role": "user", "content": "Hi"}], "response": "Hello"},
        {"turns": ["Hi"], "response": "Hello"},
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
            ]
        },
    ],
)
def test_every_format_gives_the_same_sample(line: dict[str, object]) -> None:
    record = data.parse(json.dumps(line), "x:1")
    (sample,) = data.encode_all([record], TOKENIZER, 100, VOCAB)
    asked = TOKENIZER.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert sample.tokens.tolist() == asked + TOKENIZER.encode("Hello")
    assert sample.start == len(asked)


def test_plain_text_is_all_answer() -> None:
    (sample,) = data.encode_all([data.parse('{"text": "abcdef"}', "x:1")], TOKENIZER, 100, VOCAB)
    assert sample.start == 1 and len(sample) == 6


def test_exact_tokens_are_preferred_to_the_text() -> None:
    line = '{"prompt": "p", "response": "zzz", "response_tokens": [5, 6, 7]}'
    (sample,) = data.encode_all([data.parse(line, "x:1")], TOKENIZER, 100, VOCAB)
    assert sample.tokens[sample.start :].tolist() == [5, 6, 7]


def test_answers_of_another_tokenizer_are_refused() -> None:
    line = '{"prompt": "p", "response": "z", "response_tokens": [5, 50000]}'
    with pytest.raises(UsageError, match="vocabulary"):
        data.encode_all([data.parse(line, "x:1")], TOKENIZER, 100, VOCAB)


def test_prompts_that_leave_no_room_for_an_anchor_are_an_error() -> None:
    line = json.dumps({"prompt": "p" * 90, "response": "zzz"})
    with pytest.raises(UsageError, match="no usable anchors"):
        data.encode_all([data.parse(line, "x:1")], TOKENIZER, 60, VOCAB)


def test_prompts_without_answers_are_an_error() -> None:
    with pytest.raises(UsageError, match="no answers"):
        data.encode_all([data.parse('{"prompt": "p"}', "x:1")], TOKENIZER, 60, VOCAB)


def test_no_prompt_is_both_trained_on_and_held_out() -> None:
    records = [
        data.parse(json.dumps({"prompt": f"p{i % 40}", "response": f"answer {i}"}), "x:1")
        for i in range(120)
    ]
    samples = data.encode_all(records, TOKENIZER, 100, VOCAB)
    never = frozenset({samples[0].key})
    train, held = data.split(samples, 0.25, never)
    assert train and held
    assert not {s.key for s in train} & {s.key for s in held}
    assert samples[0].key not in {s.key for s in train + held}


def test_the_draft_vocabulary_keeps_the_most_frequent_and_the_demanded() -> None:
    sample = data.TrainingSample(np.array([9, 5, 5, 5, 7, 7, 8]), 1, "k")
    counts = count_ids([sample], 12)
    ids, covered = draft_vocabulary(counts, 3, always=[11])
    assert ids.tolist() == [5, 7, 11]
    assert covered == pytest.approx(5 / 6)
    with pytest.raises(UsageError):
        draft_vocabulary(counts, 13)
