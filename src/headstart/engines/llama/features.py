"""Features: what the functions of a library make possible. A build may lack some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature that a build may lack.

    Attributes:
        name: for people.
        functions: that it needs, all of them.
        without: what happens if the build lacks it; "" if nothing works then.
    """

    name: str
    functions: tuple[str, ...]
    without: str = ""


PENALTIES = Feature("repetition penalties", ("llama_sampler_init_penalties",), "requests with penalties fail")
ADAPTERS = Feature("LoRA adapters", ("llama_adapter_lora_init", "llama_set_adapters_lora"), "adapters are refused")
DIFFUSION = "llama_model_is_diffusion"

FEATURES = (
    Feature(
        "models",
        tuple(
            "llama_backend_init llama_log_set llama_print_system_info llama_supports_gpu_offload llama_model_default_params"
            " llama_model_load_from_file llama_model_free llama_model_size llama_model_desc llama_model_meta_val_str"
            " llama_model_n_params llama_model_n_ctx_train llama_model_n_embd llama_model_n_layer llama_model_n_head"
            " llama_model_n_swa llama_model_has_encoder llama_model_is_recurrent llama_model_is_hybrid"
            " llama_model_chat_template".split()
        ),
    ),
    Feature(
        "vocabularies",
        tuple(
            "llama_model_get_vocab llama_vocab_n_tokens llama_vocab_get_attr llama_vocab_get_text llama_vocab_is_eog"
            " llama_vocab_bos llama_vocab_eos llama_vocab_sep llama_vocab_pad llama_vocab_get_add_bos llama_tokenize"
            " llama_token_to_piece".split()
        ),
    ),
    Feature(
        "computing",
        tuple(
            "llama_context_default_params llama_init_from_model llama_free llama_decode llama_batch_get_one llama_synchronize"
            " llama_get_logits_ith llama_set_n_threads".split()
        ),
    ),
    Feature("slots", ("llama_get_memory", "llama_memory_seq_rm", "llama_memory_seq_pos_max")),
    Feature(
        "moving KV and state",
        (
            "llama_state_seq_get_size",
            "llama_state_seq_get_size_ext",
            "llama_state_seq_get_data_ext",
            "llama_state_seq_set_data_ext",
        ),
    ),
    Feature(
        "sampling",
        tuple(
            "llama_sampler_chain_default_params llama_sampler_chain_init llama_sampler_chain_add llama_sampler_apply"
            " llama_sampler_accept llama_sampler_sample llama_sampler_free llama_sampler_init_greedy llama_sampler_init_dist"
            " llama_sampler_init_top_k llama_sampler_init_top_p llama_sampler_init_min_p llama_sampler_init_temp"
            " llama_sampler_init_logit_bias".split()
        ),
    ),
    Feature(
        "devices",
        (
            "ggml_backend_dev_count",
            "ggml_backend_dev_get",
            "ggml_backend_dev_type",
            "ggml_backend_dev_description",
        ),
    ),
    PENALTIES,
    ADAPTERS,
    Feature("telling diffusion models apart", (DIFFUSION,), "such models are not refused"),
    Feature("memory of devices", ("ggml_backend_dev_memory",), "nothing is planned for a GPU"),
    Feature("its version", ("llama_version",), "it is not shown"),
)
"""What a build of llama.cpp can have. Nothing works without the first ones."""


def lacking(has: Callable[[str], bool]) -> Iterator[Feature]:
    """The features of which a function is absent. `has`: whether there is a function of this name."""
    return (feature for feature in FEATURES if not all(has(name) for name in feature.functions))
