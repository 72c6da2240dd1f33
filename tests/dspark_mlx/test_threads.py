"""Several threads with one model: a round watches its layers, so rounds take turns."""

from __future__ import annotations

import threading
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx_lm
from bpe import byte_tokenizer
from decoding import toy_drafter
from mlx_lm.generate import generate_step
from toys import llama_toy

from dspark_mlx import stream_generate
from dspark_mlx.model.target import Target

PROMPT, COUNT = [5, 6, 7], 40


def test_threads_write_the_models_own_text_and_leave_it_whole() -> None:
    model, tokenizer = llama_toy(0), byte_tokenizer()
    own = [int(token) for token, _ in islice(generate_step(mx.array(PROMPT), model), COUNT)]
    drafter = toy_drafter(Target(model))
    list(stream_generate(model, tokenizer, PROMPT, 1, draft_model=drafter))
    texts: list[list[int]] = [[] for _ in range(4)]
    kind = type(model.model.layers[0])

    def work(text: list[int], **options: Any) -> None:
        replies = stream_generate(model, tokenizer, PROMPT, COUNT, schedule="fixed", **options)
        text += [response.token for response in replies]

    def work_of_others(text: list[int]) -> None:
        replies = mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=COUNT)
        text += [int(response.token) for response in replies]

    threads = [
        threading.Thread(target=work, args=(text,), kwargs={"draft_model": drafter})
        for text in texts[:3]
    ]
    threads.append(threading.Thread(target=work_of_others, args=(texts[3],)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == [own] * 4
    assert {type(layer) for layer in model.model.layers} == {kind}
