"""Arguments of the wrong kind get one clear line, whichever function they are given to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from bpe import byte_tokenizer
from toys import llama_toy

from dspark_mlx import SamplingParams, batch_generate, generate, load
from dspark_mlx.errors import UsageError
from dspark_mlx.request import Cuts

CALLS: list[Callable[[Any, Any], Any]] = [
    lambda model, tok: batch_generate(model, tok, "abc"),
    lambda model, tok: generate(model, tok, b"hello"),
    lambda model, tok: generate(model, tok, [5], cuts=Cuts(draft_length=1), num_draft_tokens=3),
    lambda model, tok: generate(model, tok, [5], cuts={"draft_length": 1}),
    lambda model, tok: generate(model, tok, [5], stop=3),
    lambda model, tok: load(None),
    lambda model, tok: load("smollm2-135m", drafter=3),
    lambda model, tok: SamplingParams(temperature=True),
    lambda model, tok: SamplingParams(temperature="a"),
    lambda model, tok: SamplingParams(top_p=None),
    lambda model, tok: SamplingParams(logit_bias=[1, 2]),
    lambda model, tok: Cuts(p_min="a"),
]


@pytest.mark.parametrize("call", CALLS)
def test_arguments_of_the_wrong_kind_are_refused(call: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(UsageError):
        call(llama_toy(0), byte_tokenizer())
