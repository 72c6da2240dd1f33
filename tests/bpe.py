"""A real byte-level BPE tokenizer, trained in memory on a few lines of many scripts."""

from __future__ import annotations

import functools
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LINES = (
    "The quick brown fox jumps over the lazy dog, again and again.",
    "def greet(name):\n    return f'Hello, {name}!'\n",
    "今天天气很好，我们去公园散步吧。",
    "日本語の文章も、正しく流れなければならない。",
    "Привет, как дела? Всё хорошо.",
    "مرحبا بالعالم",
    "family 👨‍👩‍👧‍👦 flag 🏳️‍🌈 wave 👋🏽 heart ❤️",
    "café naïve e\u0301 zero\u200bwidth",
)

TEXTS = (
    *LINES,
    "👩🏾‍🚀👨‍👩‍👧‍👦🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
    "混ぜmix混ぜ🙂🙃",
    "\ufffd a literal replacement character \ufffd",
    "  spaces   and\ttabs\n\n\nnewlines  ",
    "[brackets] <think> </think> &amp;",
    "a . b , c ! d ? don 't do n't",
)

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def byte_tokenizer(merges: int = 60, clean_up: bool = False) -> Any:
    """Every byte is a token, so tokens may end anywhere inside a character."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(special) + merges,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(LINES, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        clean_up_tokenization_spaces=clean_up,
        chat_template=TEMPLATE,
    )
    return TokenizerWrapper(fast)


def byte_ids(tokenizer: Any, data: bytes) -> list[int]:
    """The single-byte tokens of ``data``, valid UTF-8 or not."""
    letters = _letters()
    return [tokenizer.convert_tokens_to_ids(letters[b]) for b in data]


@functools.cache
def _letters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    return {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(others)}
