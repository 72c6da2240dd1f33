"""mlx-lm's functions: the same shapes, defaults and text, and clear refusals."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from bpe import byte_tokenizer
from decoding import toy_drafter
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.generate import GenerationResponse as TheirResponse
from mlx_lm.generate import batch_generate as their_batch_generate
from mlx_lm.generate import stream_generate as their_stream_generate
from mlx_lm.models.cache import make_prompt_cache as their_make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from toys import _lively, gemma3_text, llama, prompt

import dspark_mlx
from dspark_mlx.api.generate import (
    GenerationResponse,
    batch_generate,
    generate,
    make_prompt_cache,
    stream_generate,
)
from dspark_mlx.errors import DsparkError, UsageError
from dspark_mlx.events import Finished, Prefill, Queued, StepDone
from dspark_mlx.model.target import Target
from dspark_mlx.request import Cuts, SamplingParams

VOCAB = 320


def make_model(kind: str = "llama", seed: int = 0) -> Any:
    """A toy with the byte-level tokenizer's vocabulary."""
    shape: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCAB,
    }
    if kind == "llama":
        return _lively(llama.Model(llama.ModelArgs(rms_norm_eps=1e-5, **shape)), seed, 0.35)
    args = gemma3_text.ModelArgs(
        sliding_window=16, sliding_window_pattern=2, query_pre_attn_scalar=32, **shape
    )
    return _lively(gemma3_text.Model(args), seed, 0.2)


@pytest.fixture(scope="module", params=["gemma3_text"])
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(request.param)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def drafter_for(model: Any, tokens: list[int], count: int = 48) -> Any:
    lesson = [*tokens, *(t for t, _ in generate_step(mx.array(tokens), model, max_tokens=count))]
    return toy_drafter(Target(model), block=4, lessons=[lesson])


# -- shapes -----------------------------------------------------------------------------------


def test_responses_begin_with_mlx_lms_fields_in_their_order() -> None:
    theirs = [(f.name, f.default) for f in dataclasses.fields(TheirResponse)]
    ours = [(f.name, f.default) for f in dataclasses.fields(GenerationResponse)]
    assert ours[: len(theirs)] == theirs
    assert [name for name, _ in ours[len(theirs) :]] == [
        "drafted",
        "scheduled",
        "accepted",
        "confidence",
        "survival",
    ]


@pytest.mark.parametrize("name", ["stream_generate", "generate", "batch_generate", "load"])
def test_arguments_have_mlx_lms_names_order_and_defaults(name: str) -> None:
    theirs = inspect.signature(getattr(mlx_lm, name)).parameters
    ours = inspect.signature(getattr(dspark_mlx, name)).parameters
    for position, (their_name, theirs_one) in enumerate(theirs.items()):
        if theirs_one.kind is theirs_one.VAR_KEYWORD or their_name == "stream":
            continue
        assert list(ours)[position] == their_name
        assert ours[their_name].default == theirs_one.default


def test_options_of_the_step_are_there_too() -> None:
    theirs = inspect.signature(generate_step).parameters
    ours = inspect.signature(stream_generate).parameters
    for name in theirs:
        assert name in ours or name == "stream"
    theirs = inspect.signature(BatchGenerator).parameters
    ours = inspect.signature(batch_generate).parameters
    for name in theirs:  # mlx_lm.batch_generate gives the stop tokens itself
        assert name in ours or name in ("stream", "stop_tokens")


def test_a_script_needs_only_its_import_changed(model: Any, tokenizer: Any) -> None:
    texts: set[str] = set()
    for module in (mlx_lm, dspark_mlx):
        texts.add(module.generate(model, tokenizer, prompt="Hello, world", max_tokens=20))
    assert len(texts) == 1 and texts.pop()
    assert callable(dspark_mlx.make_sampler(temp=0.5))
    assert dspark_mlx.make_logits_processors(repetition_penalty=1.1)


# -- the same text ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["The quick brown fox", "日本🙂"])
@pytest.mark.parametrize("method", ["none", "lookup", "dspark"])
def test_text_and_tokens_equal_mlx_lms(model: Any, tokenizer: Any, text: str, method: Any) -> None:
    count = 24
    theirs = list(their_stream_generate(model, tokenizer, text, max_tokens=count))
    ids = tokenizer.encode(text)
    drafter = drafter_for(model, ids) if method == "dspark" else None
    ours = list(
        stream_generate(
            model, tokenizer, text, max_tokens=count, draft_model=drafter, method=method
        )
    )
    assert [r.token for r in ours] == [r.token for r in theirs]
    assert "".join(r.text for r in ours) == "".join(r.text for r in theirs)
    assert ours[-1].finish_reason == theirs[-1].finish_reason
    assert [r.finish_reason for r in ours[:-1]] == [None] * (len(ours) - 1)
    assert [r.generation_tokens for r in ours] == [r.generation_tokens for r in theirs]
    assert ours[0].prompt_tokens == theirs[0].prompt_tokens == len(ids)
    for a, b in zip(ours, theirs, strict=True):
        assert np.array(a.logprobs) == pytest.approx(np.array(b.logprobs), abs=1e-3)
        assert a.prompt_tps > 0 and a.generation_tps > 0 and a.peak_memory > 0


def test_responses_tell_what_was_drafted(model: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("The lazy dog")
    drafter = drafter_for(model, ids)
    ours = list(
        stream_generate(model, tokenizer, ids, max_tokens=40, draft_model=drafter, schedule="fixed")
    )
    drafted = [r for r in ours if r.from_draft]
    assert drafted and len(drafted) < len(ours)
    for response in ours:
        assert 0 <= response.accepted <= response.scheduled <= response.drafted <= 4
        assert (response.confidence is not None) == response.from_draft
        if response.from_draft:
            assert 0 < response.survival <= response.confidence <= 1 or response.accepted > 0
    fewer = list(
        stream_generate(
            model,
            tokenizer,
            ids,
            max_tokens=40,
            draft_model=drafter,
            num_draft_tokens=2,
            schedule="fixed",
        )
    )
    assert [r.token for r in fewer] == [r.token for r in ours]
    assert max(r.scheduled for r in fewer) == 2


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_the_last_response_says_why(model: Any, tokenizer: Any, limit: int) -> None:
    ours = list(stream_generate(model, tokenizer, [5, 6, 7], max_tokens=limit))
    theirs = list(their_stream_generate(model, tokenizer, [5, 6, 7], max_tokens=limit))
    assert [(r.token, r.finish_reason) for r in ours] == [
        (r.token, r.finish_reason) for r in theirs
    ]


def test_the_end_of_text_is_a_response_without_text(model: Any) -> None:
    tokens = [t for t, _ in generate_step(mx.array([5, 6, 7]), model, max_tokens=12)]
    at = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    tokenizer = byte_tokenizer(merges=60)
    kept = set(tokenizer.eos_token_ids)
    try:
        tokenizer.eos_token_ids = {tokens[at]}
        ours = list(stream_generate(model, tokenizer, [5, 6, 7], max_tokens=12))
        theirs = list(their_stream_generate(model, tokenizer, [5, 6, 7], max_tokens=12))
    finally:
        tokenizer.eos_token_ids = kept
    assert [r.token for r in ours] == [r.token for r in theirs] == tokens[: at + 1]
    assert ours[-1].finish_reason == theirs[-1].finish_reason == "stop"
    assert "".join(r.text for r in ours) == "".join(r.text for r in theirs)


def test_prompts_may_be_text_ids_or_an_array(model: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("a fox")
    texts = {
        generate(model, tokenizer, given, max_tokens=10)
        for given in ("a fox", ids, mx.array(ids), tuple(ids), np.array(ids))
    }
    assert len(texts) == 1


def test_a_plain_hugging_face_tokenizer_will_do(model: Any, tokenizer: Any) -> None:
    plain = tokenizer._tokenizer
    theirs = mlx_lm.generate(model, tokenizer, "a fox", max_tokens=10)
    assert generate(model, plain, "a fox", max_tokens=10) == theirs
    ids = tokenizer.encode("a fox")
    assert batch_generate(model, plain, [ids], max_tokens=10).texts == [theirs]


def test_the_tokenizer_of_each_call_is_used(model: Any, tokenizer: Any) -> None:
    class Shouting:
        bos_token = None
        eos_token_ids: frozenset[int] = frozenset()

        def decode(self, ids: Any) -> str:
            return "X" * len(ids)

    assert generate(model, tokenizer, [5, 6], max_tokens=4) != "XXXX"
    assert generate(model, Shouting(), [5, 6], max_tokens=4) == "XXXX"


def test_samplers_and_processors_are_mlx_lms(model: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("over the lazy")
    drafter = drafter_for(model, ids)
    processors = make_logits_processors(
        logit_bias={17: 2.5}, repetition_penalty=1.3, repetition_context_size=8
    )
    theirs = [
        t
        for t, _ in generate_step(mx.array(ids), model, max_tokens=24, logits_processors=processors)
    ]
    for draft in (None, drafter):
        ours = stream_generate(
            model,
            tokenizer,
            ids,
            max_tokens=24,
            draft_model=draft,
            logits_processors=processors,
            sampler=make_sampler(temp=0.0),
        )
        tokens = [r.token for r in ours]
        assert tokens == theirs[: len(tokens)]
        assert len(tokens) == 24 or tokens[-1] in tokenizer.eos_token_ids
    mx.random.seed(3)
    warm = generate(model, tokenizer, ids, max_tokens=24, sampler=make_sampler(temp=5.0))
    mx.random.seed(4)
    assert generate(model, tokenizer, ids, max_tokens=24, sampler=make_sampler(temp=5.0)) != warm


def test_a_seed_repeats_a_reply(model: Any, tokenizer: Any) -> None:
    texts = {
        generate(
            model,
            tokenizer,
            "again",
            max_tokens=16,
            method=method,
            sampling=SamplingParams(temperature=1.0, seed=11),
        )
        for method in ("none", "lookup", "none")
    }
    assert len(texts) == 1


def test_stop_strings_one_or_several(model: Any, tokenizer: Any) -> None:
    whole = generate(model, tokenizer, "Hello", max_tokens=30)
    stop = whole[8:10]
    at = whole.index(stop)
    for given in (stop, [stop], ("never", stop)):
        ours = list(stream_generate(model, tokenizer, "Hello", max_tokens=30, stop=given))
        assert "".join(r.text for r in ours) == whole[:at]
        assert ours[-1].finish_reason == "stop"


# -- progress, events, early ends -------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 9, 10, 11])
def test_progress_is_told_as_mlx_lm_tells_it(tokenizer: Any, length: int) -> None:
    told: dict[str, list[tuple[int, int]]] = {"ours": [], "theirs": []}
    model, ids = make_model(), prompt(length)
    for name, run in (("ours", stream_generate), ("theirs", their_stream_generate)):
        for _ in run(
            model,
            tokenizer,
            ids,
            max_tokens=3,
            prefill_step_size=4,
            prompt_progress_callback=lambda *a, name=name: told[name].append(a),
        ):
            pass
    assert told["ours"] == told["theirs"]


def test_events_reach_the_listener(model: Any, tokenizer: Any) -> None:
    events: list[Any] = []
    responses = list(stream_generate(model, tokenizer, "Hi", max_tokens=6, on_event=events.append))
    assert isinstance(events[0], Queued) and isinstance(events[-1], Finished)
    assert any(isinstance(e, Prefill) for e in events)
    rounds = [e for e in events if isinstance(e, StepDone)]
    assert sum(len(row.tokens) for e in rounds for row in e.rows) == len(responses)


def test_a_generator_may_be_left_at_any_token(model: Any, tokenizer: Any) -> None:
    whole = [r.token for r in stream_generate(model, tokenizer, "Hi there", max_tokens=12)]
    for n in range(1, 6):
        stream = stream_generate(model, tokenizer, "Hi there", max_tokens=12)
        assert [next(stream).token for _ in range(n)] == whole[:n]
        stream.close()
    two = [
        stream_generate(model, tokenizer, text, max_tokens=12) for text in ("Hi there", "Hi there")
    ]
    assert [(a.token, b.token) for a, b in zip(*two, strict=True)] == [(t, t) for t in whole]


# -- prompt caches ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["none", "lookup", "dspark"])
def test_a_prompt_cache_continues_a_conversation(model: Any, tokenizer: Any, method: Any) -> None:
    turns = [tokenizer.encode(t) for t in ("Hello, fox.", " And the dog?", " Again!")]
    drafter = drafter_for(model, turns[0]) if method == "dspark" else None
    ours_cache, theirs_cache = make_prompt_cache(model), their_make_prompt_cache(model)
    whole: list[int] = []
    for turn in turns:
        theirs = [
            r.token
            for r in their_stream_generate(
                model, tokenizer, turn, max_tokens=10, prompt_cache=theirs_cache
            )
        ]
        ours = list(
            stream_generate(
                model,
                tokenizer,
                turn,
                max_tokens=10,
                prompt_cache=ours_cache,
                draft_model=drafter,
                method=method,
            )
        )
        whole += [*turn, *theirs]
        assert [r.token for r in ours] == theirs
        assert ours[0].prompt_tokens == len(turn)
        assert ours_cache.tokens == whole
        assert ours_cache.prefix is not None
        assert ours_cache.prefix.tokens == whole[:-1], "all but the last token is in the cache"


def test_a_conversation_left_early_goes_on_from_what_was_seen(tokenizer: Any) -> None:
    model = make_model()
    cache = make_prompt_cache(model)
    first = stream_generate(model, tokenizer, "Hello", max_tokens=30, prompt_cache=cache)
    seen = [next(first).token for _ in range(4)]
    first.close()
    text = [*tokenizer.encode("Hello"), *seen]
    assert cache.tokens == text
    more = tokenizer.encode(" go on")
    ours = [
        r.token for r in stream_generate(model, tokenizer, more, max_tokens=8, prompt_cache=cache)
    ]
    steps = generate_step(mx.array([*text, *more]), model, max_tokens=8)
    assert ours == [t for t, _ in steps]


def test_a_refused_call_leaves_the_prompt_cache_as_it_was(tokenizer: Any) -> None:
    model = make_model()
    cache = make_prompt_cache(model)
    generate(model, tokenizer, "Hello", max_tokens=3, prompt_cache=cache)
    tokens, prefix = list(cache.tokens), cache.prefix
    for options in ({"prompt": [VOCAB]}, {"prompt": "a", "max_tokens": 0}):
        with pytest.raises(UsageError):
            generate(model, tokenizer, prompt_cache=cache, **options)
        assert cache.tokens == tokens and cache.prefix is prefix is not None


def test_a_prompt_cache_is_of_one_model_and_one_quantisation(tokenizer: Any) -> None:
    model, other = make_model(), make_model(seed=1)
    cache = make_prompt_cache(model)
    with pytest.raises(UsageError, match="another model"):
        generate(other, tokenizer, "Hello", max_tokens=3, prompt_cache=cache)
    for first, second in (
        ({}, {"kv_bits": 8}),
        ({"kv_bits": 8}, {}),
        ({"kv_bits": 8}, {"kv_bits": 4}),
    ):
        cache = dspark_mlx.make_prompt_cache(model)
        generate(model, tokenizer, "Hello", max_tokens=3, prompt_cache=cache, **first)
        with pytest.raises(UsageError, match="was begun with"):
            generate(model, tokenizer, " you", max_tokens=3, prompt_cache=cache, **second)
        assert generate(model, tokenizer, " you", max_tokens=3, prompt_cache=cache, **first)


# -- batches ----------------------------------------------------------------------------------


def test_batches_equal_mlx_lms(model: Any, tokenizer: Any) -> None:
    prompts = [tokenizer.encode(t) for t in ("Hello", "The quick brown", "日", "def f(")]
    limits = [12, 5, 20, 9]
    theirs = their_batch_generate(
        model,
        tokenizer,
        prompts,
        max_tokens=limits,
        return_token_ids=True,
        return_logprobs=True,
    )
    drafter = drafter_for(model, prompts[1])
    for options in ({}, {"max_rows": 2}, {"draft_model": drafter}, {"method": "none"}):
        ours = batch_generate(
            model,
            tokenizer,
            prompts,
            max_tokens=limits,
            return_token_ids=True,
            return_logprobs=True,
            **options,
        )
        assert ours.token_ids == theirs.token_ids
        assert ours.texts == theirs.texts
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert a == pytest.approx(b, abs=1e-3)
        assert ours.stats.generation_tokens == theirs.stats.generation_tokens
        assert ours.stats.prompt_tokens == sum(map(len, prompts))
    small = {"completion_batch_size": 2, "prefill_batch_size": 2, "prefill_step_size": 2}
    few = batch_generate(model, tokenizer, prompts, max_tokens=limits, **small)
    assert few.texts == theirs.texts and few.token_ids is None
    alike = (["Hello"], [mx.array(prompts[0])])
    assert [batch_generate(model, tokenizer, one, max_tokens=12).texts for one in alike] == [
        theirs.texts[:1]
    ] * 2


def test_batches_take_sampling_per_prompt_and_processors(model: Any, tokenizer: Any) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    sampling = [SamplingParams(), SamplingParams(temperature=1.0, seed=3)]
    together = batch_generate(
        model, tokenizer, prompts, max_tokens=10, sampling=sampling, return_token_ids=True
    )
    for ids, one, tokens in zip(prompts, sampling, together.token_ids, strict=True):
        alone = [
            r.token for r in stream_generate(model, tokenizer, ids, max_tokens=10, sampling=one)
        ]
        assert tokens == [t for t in alone if t not in tokenizer.eos_token_ids]
    processors = make_logits_processors(logit_bias={33: 1e4})
    biased = batch_generate(
        model,
        tokenizer,
        prompts,
        max_tokens=3,
        logits_processors=processors,
        return_token_ids=True,
    )
    assert biased.token_ids == [[33] * 3] * 2


# -- what cannot be honoured ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_kv_size": 64}, "drops part of the context"),
        ({"input_embeddings": mx.zeros((1, 4, 32))}, "embeddings"),
        ({"kv_bits": 8, "quantized_kv_start": 5}, "quantized_kv_start"),
        ({"kv_bits": 7}, "7 bits"),
        ({"kv_bits": 8, "kv_group_size": 7}, "groups of 7"),
        ({"kv_bits": 8, "kv_group_size": 128}, "8 bits"),  # the toy's heads are 32 wide
        ({"prefill_step_size": 0}, "prefill step"),
        ({"stop": b"x"}, "must be text"),
        ({"prompt_cache": []}, "mlx-lm's"),
        ({"draft_model": object()}, "a drafter, a small language model or a folder"),
        ({"draft_model": "/no/such/folder"}, "no drafter folder"),
        ({"method": "dspark"}, "needs a drafter"),
        ({"method": "magic"}, "method"),
        ({"schedule": "magic"}, "schedule"),
        ({"max_tokens": 0}, "max tokens"),
        (
            {"sampler": make_sampler(temp=1.0), "sampling": SamplingParams()},
            "sampler or sampling",
        ),
        ({"num_draft_tokens": -1}, "draft length"),
        ({"logits_processors": [lambda t, x: x[0]]}, "logits processor"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(
    tokenizer: Any, options: dict[str, Any], why: str
) -> None:
    model = make_model()
    with pytest.raises(DsparkError, match=why):
        list(stream_generate(model, tokenizer, [5, 6, 7], **options))
    assert generate(model, tokenizer, [5, 6, 7], max_tokens=3)  # and nothing is broken by it


@pytest.mark.parametrize("bad", [[], "", None, 5, [VOCAB], [-1], [2.5], mx.array([[5, 6]])])
def test_bad_prompts_are_refused(tokenizer: Any, bad: Any) -> None:
    with pytest.raises(DsparkError):
        list(stream_generate(make_model(), tokenizer, bad))


def test_refusals_of_batches_and_loading(tokenizer: Any) -> None:
    model = make_model()
    for options in (
        {"prompt_caches": [[]]},
        {"return_prompt_caches": True},
        {"max_kv_size": 10},
        {"max_rows": 0},
        {"prefill_step_size": 0},
        {"max_tokens": [3, 3]},
        {"sampling": []},
        {"sampler": make_sampler(temp=1.0), "sampling": SamplingParams()},
    ):
        with pytest.raises(UsageError):
            batch_generate(model, tokenizer, [[5]], **options)
    with pytest.raises(UsageError, match="max_kv_size"):
        make_prompt_cache(model, max_kv_size=10)
    for options in (
        {"adapter_path": "x"},
        {"trust_remote_code": True},
        {"model_config": {"a": 1}},
        {"nonsense": 1},
    ):
        with pytest.raises(UsageError):
            dspark_mlx.load("smollm2-135m", **options)


def test_quantised_caches_are_used(tokenizer: Any) -> None:
    model = make_model()
    memory = []
    for bits in (None, 8):
        tokens = [
            r.token
            for r in stream_generate(
                model,
                tokenizer,
                prompt(300),
                max_tokens=4,
                kv_bits=bits,
                on_event=lambda e: memory.append(e.memory.kv) if isinstance(e, StepDone) else 0,
            )
        ]
        assert len(tokens) == 4
    assert memory[-1] < 0.5 * memory[0]


def test_each_group_size_is_a_cache_of_its_own(tokenizer: Any) -> None:
    model = make_model()
    model.args.head_dim = 64
    model = _lively(llama.Model(model.args), 0, 0.35)
    memory: list[int] = []
    for group in (32, 64, None):
        note = lambda e: memory.append(e.memory.kv) if isinstance(e, StepDone) else 0  # noqa: E731
        options = {"kv_bits": 8, "kv_group_size": group, "on_event": note}
        list(stream_generate(model, tokenizer, prompt(30), max_tokens=1, **options))
    assert memory[0] > memory[1] == memory[2]


def test_cuts_hold_for_every_proposer(model: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("the the the the")
    for method in ("lookup", "dspark"):
        ours = list(
            stream_generate(
                model,
                tokenizer,
                ids,
                max_tokens=24,
                method=method,
                draft_model=drafter_for(model, ids) if method == "dspark" else None,
                cuts=Cuts(draft_length=1),
                schedule="fixed",
            )
        )
        assert max(r.scheduled for r in ours) <= 1


def test_verbose_prints_the_reply_and_its_speed(
    model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text = generate(model, tokenizer, "Hi", max_tokens=5, verbose=True)
    printed = capsys.readouterr().out
    assert text in printed and "tokens-per-sec" in printed and "Peak memory" in printed
