"""The parts of a layer: each function draws the tensors of one part, with names without their layer.

Gains are chosen so that an early token changes late logits. Attention is sharp, because flat attention over hundreds of tokens
would change nothing. State decays over hundreds of tokens and does not grow. Tensors that llama.cpp multiplies element by
element or convolves must be float32: llama.cpp loads others, and then aborts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]

WIDTH, HEADS, KV_HEADS, HEAD, FFN = 128, 4, 2, 32, 192
WINDOW = 128
CONV, SHORT_CONV = 4, 3
SSM_HEADS, SSM_GROUPS, SSM_STATE = 4, 2, 32
INNER = 2 * WIDTH
"""Width of a Mamba layer; llama.cpp supports only twice the model's width."""
WKV_HEAD = 64
"""Head size of RWKV-7. llama.cpp's AVX-512 kernel reads beyond the end of heads that are not a multiple of it."""
EXPERTS, USED, EXPERT_FFN = 4, 2, 64
RANK = 16


class Dice:
    """Random weights: normal, with a standard deviation of `gain / sqrt(columns)`."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def matrix(self, rows: int, columns: int, gain: float = 1.0, dtype: npt.DTypeLike = np.float16) -> Array:
        drawn = self._random.standard_normal((rows, columns), np.float32)
        weights: Array = (drawn * (gain / columns**0.5)).astype(dtype)
        return weights

    def vector(self, count: int, spread: float, centre: float = 0.0) -> Array:
        return (centre + spread * self._random.standard_normal(count, np.float32)).astype(np.float32)


Tensors = Iterator[tuple[str, Array]]
Part = Callable[[Dice], Tensors]


def full(count: int, value: float = 1.0) -> Array:
    return np.full(count, value, np.float32)


def spaced(count: int, first: float, last: float) -> Array:
    """Values from `first` to `last` in a geometric progression."""
    return np.geomspace(first, last, count, dtype=np.float32)


# ── attention ────────────────────────────────────────────────────────────────────────────────────────────────────────


def attention(dice: Dice) -> Tensors:
    yield "attn_norm.weight", full(WIDTH)
    yield "attn_q.weight", dice.matrix(HEADS * HEAD, WIDTH, gain=2.0)
    yield "attn_k.weight", dice.matrix(KV_HEADS * HEAD, WIDTH, gain=2.0)
    yield "attn_v.weight", dice.matrix(KV_HEADS * HEAD, WIDTH)
    yield "attn_output.weight", dice.matrix(WIDTH, HEADS * HEAD)


def _query_key_norms() -> Tensors:
    yield "attn_q_norm.weight", full(HEAD, 2.0)
    yield "attn_k_norm.weight", full(HEAD, 2.0)


def normed_attention(dice: Dice) -> Tensors:
    """Attention with queries and keys normalised by head."""
    yield from attention(dice)
    yield from _query_key_norms()


def gated_attention(dice: Dice) -> Tensors:
    """Qwen3.5's attention: normalised, and each head has a gate for its output."""
    for name, tensor in normed_attention(dice):
        yield name, dice.matrix(2 * HEADS * HEAD, WIDTH, gain=2.0) if name == "attn_q.weight" else tensor


def attention_with_sinks(dice: Dice) -> Tensors:
    """gpt-oss's attention: with biases, and a sink logit for each head."""
    yield from attention(dice)
    yield "attn_q.bias", dice.vector(HEADS * HEAD, 0.1)
    yield "attn_k.bias", dice.vector(KV_HEADS * HEAD, 0.1)
    yield "attn_v.bias", dice.vector(KV_HEADS * HEAD, 0.1)
    yield "attn_output.bias", dice.vector(WIDTH, 0.1)
    yield "attn_sinks.weight", dice.vector(HEADS, 1.0)


# ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def delta_net(dice: Dice) -> Tensors:
    """Gated DeltaNet: decay by head, and each token overwrites part of what its key finds."""
    keys, values = SSM_GROUPS * SSM_STATE, SSM_HEADS * SSM_STATE
    yield "attn_norm.weight", full(WIDTH)
    yield "attn_qkv.weight", dice.matrix(2 * keys + values, WIDTH)
    yield "attn_gate.weight", dice.matrix(values, WIDTH)
    yield "ssm_conv1d.weight", dice.matrix(2 * keys + values, CONV, dtype=np.float32)
    yield "ssm_dt.bias", full(SSM_HEADS, 0.0)
    yield "ssm_a", -spaced(SSM_HEADS, 0.001, 0.03)
    yield "ssm_alpha.weight", dice.matrix(SSM_HEADS, WIDTH, dtype=np.float32)
    yield "ssm_beta.weight", dice.matrix(SSM_HEADS, WIDTH, dtype=np.float32)
    yield "ssm_norm.weight", full(SSM_STATE)
    yield "ssm_out.weight", dice.matrix(WIDTH, values)


def short_convolution(dice: Dice) -> Tensors:
    """LFM2's short convolution: its state is the last two tokens."""
    yield "attn_norm.weight", full(WIDTH)
    yield "shortconv.in_proj.weight", dice.matrix(3 * WIDTH, WIDTH)
    yield "shortconv.conv.weight", dice.matrix(WIDTH, SHORT_CONV, dtype=np.float32)
    yield "shortconv.out_proj.weight", dice.matrix(WIDTH, WIDTH)


def _mamba2(dice: Dice) -> Tensors:
    convolved = INNER + 2 * SSM_GROUPS * SSM_STATE
    yield "ssm_in.weight", dice.matrix(INNER + convolved + SSM_HEADS, WIDTH)
    yield "ssm_conv1d.weight", dice.matrix(convolved, CONV, dtype=np.float32)
    yield "ssm_conv1d.bias", dice.vector(convolved, 0.1)
    yield "ssm_dt.bias", full(SSM_HEADS, -3.0)
    yield "ssm_a", -spaced(SSM_HEADS, 0.01, 0.5).reshape(SSM_HEADS, 1)
    yield "ssm_d", full(SSM_HEADS).reshape(SSM_HEADS, 1)
    yield "ssm_norm.weight", full(INNER).reshape(SSM_GROUPS, INNER // SSM_GROUPS)
    yield "ssm_out.weight", dice.matrix(WIDTH, INNER)


def mamba2(dice: Dice) -> Tensors:
    yield "attn_norm.weight", full(WIDTH)
    yield from _mamba2(dice)


def attention_beside_mamba2(dice: Dice) -> Tensors:
    """Falcon-H1's layer: attention and Mamba-2 read the same input, and their outputs are added."""
    yield from attention(dice)
    yield from _mamba2(dice)


def rwkv7_time(dice: Dice) -> Tensors:
    """RWKV-7's state: decay by channel, and each token overwrites part of what its key finds."""
    for name in ("attn_norm", "attn_norm_2"):
        yield f"{name}.weight", full(WIDTH)
        yield f"{name}.bias", full(WIDTH, 0.0)
    for name, centre in (("w", -4.0), ("a", -3.0), ("v", 1.0)):
        yield f"time_mix_{name}0.weight", dice.vector(WIDTH, 0.5, centre)
        yield f"time_mix_{name}1.weight", dice.matrix(RANK, WIDTH)
        yield f"time_mix_{name}2.weight", dice.matrix(WIDTH, RANK)
    yield "time_mix_g1.weight", dice.matrix(RANK, WIDTH)
    yield "time_mix_g2.weight", dice.matrix(WIDTH, RANK, gain=2.0)
    yield "time_mix_lerp_fused.weight", full(6 * WIDTH, 0.3).reshape(6, 1, 1, WIDTH)
    yield "time_mix_k_k.weight", full(WIDTH)
    yield "time_mix_k_a.weight", full(WIDTH)
    yield "time_mix_r_k.weight", dice.vector(WIDTH, 0.1)
    for name in ("key", "value", "receptance", "output"):
        yield f"time_mix_{name}.weight", dice.matrix(WIDTH, WIDTH)
    yield "time_mix_ln.weight", full(WIDTH)
    yield "time_mix_ln.bias", full(WIDTH, 0.0)


# ── feed forward ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _gated(dice: Dice) -> Tensors:
    yield "ffn_gate.weight", dice.matrix(FFN, WIDTH)
    yield "ffn_up.weight", dice.matrix(FFN, WIDTH)
    yield "ffn_down.weight", dice.matrix(WIDTH, FFN)


def feed_forward(dice: Dice) -> Tensors:
    yield "ffn_norm.weight", full(WIDTH)
    yield from _gated(dice)


def feed_forward_qwen(dice: Dice) -> Tensors:
    yield "post_attention_norm.weight", full(WIDTH)
    yield from _gated(dice)


def feed_forward_falcon(dice: Dice) -> Tensors:
    yield "ffn_norm", full(WIDTH)
    yield from _gated(dice)


def feed_forward_gemma(dice: Dice) -> Tensors:
    """Gemma's: normalised before and after, like the output of attention."""
    yield "post_attention_norm.weight", full(WIDTH)
    yield from feed_forward(dice)
    yield "post_ffw_norm.weight", full(WIDTH)


def experts(dice: Dice) -> Tensors:
    """gpt-oss's experts: each token uses two of them."""
    yield "post_attention_norm.weight", full(WIDTH)
    yield "ffn_gate_inp.weight", dice.matrix(EXPERTS, WIDTH, dtype=np.float32)
    yield "ffn_gate_inp.bias", dice.vector(EXPERTS, 0.1)
    for name, rows, columns in (("gate", EXPERT_FFN, WIDTH), ("up", EXPERT_FFN, WIDTH), ("down", WIDTH, EXPERT_FFN)):
        yield f"ffn_{name}_exps.weight", dice.matrix(EXPERTS * rows, columns).reshape(EXPERTS, rows, columns)
        yield f"ffn_{name}_exps.bias", dice.vector(EXPERTS * rows, 0.1).reshape(EXPERTS, rows)


def rwkv7_channel(dice: Dice) -> Tensors:
    yield "channel_mix_lerp_k.weight", full(WIDTH, 0.3).reshape(1, 1, WIDTH)
    yield "channel_mix_key.weight", dice.matrix(FFN, WIDTH)
    yield "channel_mix_value.weight", dice.matrix(WIDTH, FFN)
