"""Tiny models in Hugging Face's form, with random weights: a folder that mlx-lm, transformers and vLLM would load.

Their tokenizer writes each byte as one token, or has learnt words from a text. It knows ChatML's control tokens.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(CONTROLS)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_DELTA_NET: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 48, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 128,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "expand": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.0, 100.0],
        "time_step_rank": "auto",
        "chunk_size": 64,
        "ssm_state_size": 16,
        "max_seq_len": 4096,
    },
    "qwen3_5": _DELTA_NET,
    "qwen3_next": _DELTA_NET
    | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "granitemoehybrid": {
        "attention_bias": False,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 0.5,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 128,
        "position_embedding_type": "nope",
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "gpt_oss": {"sliding_window": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    "falcon_h1": {
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
        "lm_head_multiplier": 1.0,
    },
}
"""What each kind's config has beside the common sizes."""
QUANTISED = "-4bit"
MODELS = (*KINDS, f"qwen3{QUANTISED}", f"qwen3_5{QUANTISED}")
"""Names of models: a kind, with weights of 4 bits or not."""


def named(folder: Path, name: str) -> Path:
    """The folder of a model of `MODELS` in `folder`, where it is written if it is not there. Beside 4 bits all is bfloat16."""
    path, kind = folder / name, name.removesuffix(QUANTISED)
    if path.exists():
        return path
    return write(path, kind) if kind == name else write(path, kind, dtype="bfloat16", bits=4)


def write(
    folder: Path, kind: str, *, dtype: str = "float32", bits: int | None = None, seed: int = 0, words: str = "", **sizes: Any
) -> Path:
    """Writes a model; returns its folder.

    Args:
        bits: quantises the weights, 64 at a time.
        words: a text from which the tokenizer learns; "" for bytes.
        sizes: in place of the config's.
    """
    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_flatten, tree_map

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = word_tokenizer(words) if words else byte_tokenizer()
    end, _, turn = map(tokenizer.token_to_id, CONTROLS)
    known = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": turn, "bos_token_id": end}
    config = {"model_type": kind, **_SIZES, **KINDS[kind], **known, **sizes}
    module = import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    width = getattr(mx, dtype)
    model.update(tree_map(lambda array: array.astype(width), model.parameters()))
    if bits is not None:
        nn.quantize(model, group_size=64, bits=bits)
        config["quantization"] = {"group_size": 64, "bits": bits}
    mx.eval(model.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, turn]}))
    write_tokenizer(folder, tokenizer)
    return folder


def byte_token(byte: int) -> int:
    """The token of a byte, if each is one."""
    from tokenizers import pre_tokenizers

    letter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(byte))[0][0]
    return sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter)


def byte_tokenizer() -> Tokenizer:
    """Each byte is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROLS])
    return tokenizer


def word_tokenizer(text: str, size: int = 2048) -> Tokenizer:
    """Words of a text are few tokens, as in large models; each digit is one. `size`: most tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    digits, rest = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, rest])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size - len(CONTROLS), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROLS])
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer | None = None) -> None:
    """The tokenizer's files, and the chat template. Without a tokenizer it is that of bytes."""
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {"bos_token": None, "eos_token": "<|im_end|>", "chat_template": CHATML}
    options |= {"tokenizer_class": "PreTrainedTokenizerFast"}  # else transformers makes the tokenizer of the kind's authors
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
