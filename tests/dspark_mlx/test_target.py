"""The target: mlx-lm's own forward, read on the way, on our rows of caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from decoding import (
    ScriptProposer,
    dspark,
    make_engine,
    plain_text,
    request,
    run,
    run_one,
    toy_drafter,
    toy_target,
)
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import (
    cohere2,
    gemma2,
    gemma3_text,
    gpt2,
    gptj,
    mamba,
    mixtral,
    phi,
    phi3,
    qwen2,
    starcoder2,
)
from toys import MODELS, _lively, hybrid_toy, llama_toy, prompt, qwen3_toy

from dspark_mlx.draft.dspark.pairing import check_pairing
from dspark_mlx.draft.lookup import LookupProposer
from dspark_mlx.errors import CacheError, DsparkError, ModelError, PairingError
from dspark_mlx.model.taps import EAGER_LAYERS
from dspark_mlx.model.target import Target

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}

OTHERS: dict[str, Callable[[], nn.Module]] = {
    "gptj": lambda: gptj.Model(  # calls its layers by keyword
        gptj.ModelArgs(
            model_type="gptj",
            n_embd=32,
            n_head=4,
            n_layer=2,
            n_positions=128,
            layer_norm_epsilon=1e-5,
            rotary_dim=8,
            vocab_size=96,
        )
    ),
    "qwen2": lambda: qwen2.Model(
        qwen2.ModelArgs(model_type="qwen2", rms_norm_eps=1e-6, max_position_embeddings=512, **SHAPE)
    ),
    "gemma2": lambda: gemma2.Model(
        gemma2.ModelArgs(model_type="gemma2", head_dim=8, rms_norm_eps=1e-6, **SHAPE)
    ),
    "cohere2": lambda: cohere2.Model(
        cohere2.ModelArgs(
            model_type="cohere2", head_dim=8, sliding_window=8, sliding_window_pattern=2, **SHAPE
        )
    ),
    "phi3": lambda: phi3.Model(
        phi3.ModelArgs(model_type="phi3", rms_norm_eps=1e-6, tie_word_embeddings=True, **SHAPE)
    ),
    "starcoder2": lambda: starcoder2.Model(
        starcoder2.ModelArgs(model_type="starcoder2", norm_epsilon=1e-5, **SHAPE)
    ),
    "mixtral": lambda: mixtral.Model(
        mixtral.ModelArgs(
            model_type="mixtral",
            num_experts_per_tok=2,
            num_local_experts=4,
            rms_norm_eps=1e-6,
            rope_theta=1e4,
            **SHAPE,
        )
    ),
}


def by_hand(model: nn.Module, tokens: mx.array) -> list[mx.array]:
    """The input of the first layer and every layer's output, layer by layer."""
    inner = model.model
    h = inner.embed_tokens(tokens)
    if isinstance(model, gemma3_text.Model):
        h = h * mx.array(inner.args.hidden_size**0.5, mx.bfloat16).astype(h.dtype)
    states = [h]
    for layer in inner.layers:
        h = layer(h, "causal", None)
        states.append(h)
    return states


@pytest.mark.parametrize("kind", MODELS)
def test_taps_are_the_raw_outputs_of_their_layers(kind: str) -> None:
    target = toy_target(kind)
    tokens = mx.array([prompt(10)])
    states = by_hand(target.model, tokens)
    for taps in ((-1,), (0,), (1,), (1, -1), (-1, 0, 1), (0, 0)):
        logits, features = target.forward(tokens, target.make_rows(), taps)
        assert features is not None and features.shape == (1, 10, 32 * len(taps))
        wanted = mx.concatenate([states[t + 1] for t in taps], axis=-1)
        assert np.array(features) == pytest.approx(np.array(wanted), abs=1e-4)
        plain = target.model(tokens)
        assert np.array(logits) == pytest.approx(np.array(plain), abs=1e-3)


@pytest.mark.parametrize("kind", MODELS)
def test_work_on_the_first_layers_begins_before_the_last_are_built(kind: str) -> None:
    target = toy_target(kind)
    tokens = mx.array([prompt(10)])
    states = by_hand(target.model, tokens)
    for taps in ((), (0,), (-1, 1)):
        begun: list[mx.array] = []
        logits, features = target.forward(tokens, target.make_rows(), taps, eager=begun.append)
        assert len(begun) == -(-target.num_layers // EAGER_LAYERS)
        for n, hidden in enumerate(begun):
            wanted = np.array(states[n * EAGER_LAYERS + 1])
            assert np.array(hidden) == pytest.approx(wanted, abs=1e-4)
        plain, same = target.forward(tokens, target.make_rows(), taps)
        assert np.array_equal(np.array(logits), np.array(plain))
        if features is None or same is None:
            assert features is same is None
        else:
            assert np.array_equal(np.array(features), np.array(same))
    assert not any("_keeps" in vars(layer) for layer in target.layers)


def test_one_module_may_be_several_layers() -> None:
    model = llama_toy()
    model.model.layers = [model.model.layers[0]] * 4
    target, tokens = Target(model), mx.array([prompt(10)])
    plain, kind = np.array(model(tokens)), type(model.model.layers[0])
    for taps in ((), (0,)):
        begun: list[mx.array] = []
        logits, _ = target.forward(tokens, target.make_rows(), taps, eager=begun.append)
        assert np.array(logits) == pytest.approx(plain, abs=1e-3)
        assert len(begun) == 4 and type(model.model.layers[0]) is kind


def test_a_draft_and_its_verification_are_begun_while_the_rest_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the device waits for the host in every round that drafts."""
    order: list[str] = []
    begin, wait = mx.async_eval, mx.eval
    monkeypatch.setattr(mx, "async_eval", lambda *a: (order.append("begin"), begin(*a)))
    monkeypatch.setattr(mx, "eval", lambda *a: (order.append("wait"), wait(*a)))
    target = toy_target()
    engine = make_engine(target, [dspark(target)])
    engine.submit(request())
    engine.step()
    order.clear()
    engine.step()
    layers = -(-target.num_layers // EAGER_LAYERS)
    assert order == ["begin"] * (1 + layers) + ["wait"], "the draft, then layers; one wait at last"


@pytest.mark.parametrize("kind", MODELS)
def test_tapping_leaves_the_model_as_it_was(kind: str) -> None:
    target = toy_target(kind)
    names = [name for name, _ in tree_flatten(target.model.parameters())]
    classes = [type(layer) for layer in target.layers]
    target.forward(mx.array([[1, 2, 3]]), target.make_rows(), (-1, 0, 1))
    assert [name for name, _ in tree_flatten(target.model.parameters())] == names
    assert [type(layer) for layer in target.layers] == classes
    assert not any("_keeps" in vars(layer) for layer in target.layers)

    class Fails(nn.Module):
        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            raise RuntimeError("in the middle of a layer")

    model = llama_toy()
    broken = Target(model)
    broken.layers[1].self_attn = Fails()
    with pytest.raises(RuntimeError, match="middle"):
        broken.forward(mx.array([[1, 2]]), broken.make_rows(), (0, 1))
    assert [type(layer) for layer in broken.layers] == [type(toy_target("llama").layers[0])] * 2


def test_what_a_drafter_needs_to_know() -> None:
    tied, untied = Target(qwen3_toy(), {"max_position_embeddings": 4096}), toy_target("llama")
    assert (tied.vocab_size, tied.hidden_size, tied.num_layers) == (96, 32, 2)
    assert tied.lm_head is None and untied.embed_tokens.weight.shape == (96, 32)
    assert tied.context_limit == 4096 and untied.context_limit == 0
    nested = Target(qwen3_toy(), {"text_config": {"max_position_embeddings": 77}})
    assert nested.context_limit == 77
    assert tied.weight_bytes == sum(v.nbytes for _, v in tree_flatten(tied.model.parameters()))
    quantised = qwen3_toy()
    nn.quantize(quantised, group_size=32, bits=8)
    assert Target(quantised).hidden_size == 32


@pytest.mark.parametrize("kind", MODELS)
def test_bytes_of_a_position_are_those_that_are_held(kind: str) -> None:
    for bits in (None, 8, 4):
        target = toy_target(kind, kv_bits=bits)
        rows = target.make_rows()
        target.forward(mx.array([prompt(256)]), rows)
        assert rows.nbytes == pytest.approx(256 * target.kv_bytes_per_token)


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_check_and_decode_on_our_caches(name: str) -> None:
    """Each with its own masks, offsets, soft caps or experts; ragged rows too."""
    model = _lively(OTHERS[name](), 1, 0.3)
    target = Target(model)
    target.check((-1, 0, 1))
    own = {}
    for i, length in enumerate((5, 19, 11)):
        steps = generate_step(mx.array(prompt(length, i)), model, max_tokens=16)
        own[str(i)] = [token for token, _ in steps]
    scripts = [[*prompt(n, i), *own[str(i)]] for i, n in enumerate((5, 19, 11))]
    engine = make_engine(target, [ScriptProposer(scripts, 4, 0.3)])
    asked = [
        request(str(i), n, i, max_tokens=16, ignore_eos=True) for i, n in enumerate((5, 19, 11))
    ]
    ran = run(engine, *asked)
    assert {id: reply.tokens for id, reply in ran.items()} == own
    # Gemma 2 computes its attention itself, in a shape that ragged masks do not fit.
    assert engine.max_rows == (1 if name == "gemma2" else 8)


UNREAD: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: gpt2.Model(
        gpt2.ModelArgs(
            model_type="gpt2",
            n_ctx=128,
            n_embd=32,
            n_head=2,
            n_layer=2,
            n_positions=128,
            layer_norm_epsilon=1e-5,
            vocab_size=96,
        )
    ),
    "phi": lambda: phi.Model(phi.ModelArgs(model_type="phi", partial_rotary_factor=0.5, **SHAPE)),
    "mamba": lambda: mamba.Model(
        mamba.ModelArgs(
            model_type="mamba",
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            state_size=8,
            num_hidden_layers=2,
            conv_kernel=4,
            use_bias=False,
            use_conv_bias=True,
            time_step_rank=4,
        )
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_models_whose_parts_have_other_names_decode_without_a_drafter(name: str) -> None:
    """Plainly, and with prompt lookup where their cache can be rolled back."""
    model = _lively(UNREAD[name](), 1, 0.3)
    target = Target(model)
    target.check()
    assert (target.vocab_size, target.hidden_size) == (96, 0)
    assert target.dtype == mx.float32
    text = [*prompt(9), *prompt(9)]
    own = [t for t, _ in generate_step(mx.array(text), model, max_tokens=16)]
    proposers = [[]] if target.rollback == "none" else [[], [LookupProposer(4)]]
    for each in proposers:
        ask = request(tokens=tuple(text), max_tokens=16, ignore_eos=True)
        assert run_one(make_engine(target, each), ask).tokens == own
    with pytest.raises(PairingError, match="no token embedding"):
        check_pairing(toy_drafter(toy_target("llama")).config, target)


def test_a_model_that_our_cache_would_change_is_refused() -> None:
    """Here: one whose attention depends on how its input was cut into calls."""

    class Sensitive(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer
            self.use_sliding = False

        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            return self.layer(x, mask, cache) + x.shape[1]

    model = llama_toy()
    model.model.layers[1] = Sensitive(model.model.layers[1])
    with pytest.raises(ModelError, match="logits change by"):
        Target(model).check()


def test_a_tap_that_does_not_exist_is_named() -> None:
    for tap in (3, 17, -2):  # 2 is the output of the final norm
        with pytest.raises(ModelError, match=f"tap {tap} does not exist.*0..1"):
            toy_target("llama").check((0, tap))


def test_caches_are_chosen_by_what_the_model_asks_for() -> None:
    assert toy_target("llama").factory.windows == (None, None)
    assert toy_target("llama-window").factory.windows == (None, 16)
    assert toy_target("gemma3").factory.windows == (16, None)
    assert toy_target("llama").rollback == "exact"
    assert Target(hybrid_toy()).factory.cannot_roll_back == ("ArraysCache",)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_width_of_quantised_caches_runs(bits: int) -> None:
    target = Target(llama_toy(), kv_bits=bits)
    target.check()
    ran = run_one(make_engine(target), request(max_tokens=12, ignore_eos=True))
    own = plain_text("llama", tuple(prompt(12)), 12)
    if bits == 8:
        assert tuple(ran.tokens) == own
    assert len(ran.tokens) == 12


@pytest.mark.parametrize("bits", [0, 1.5, 7, 9, 16, -8])
def test_a_width_that_does_not_exist_is_refused_in_words(bits: Any) -> None:
    with pytest.raises(DsparkError, match="bits"):
        Target(llama_toy(), kv_bits=bits).check()


def test_heads_that_cannot_be_quantised_are_refused_in_words() -> None:
    model = OTHERS["qwen2"]()  # heads of 8
    with pytest.raises(CacheError, match="head"):
        target = Target(model, kv_bits=8)
        target.check()
        run_one(make_engine(target), request())
