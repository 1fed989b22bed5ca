"""Tiny, randomly initialised architectures of the transformers library, each with a batch of inputs.

Two layers, hidden size about 64, float32, dropout 0, a fixed seed: no download, seconds on a CPU. The configurations
are those of the project's shared cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.errors import ModelSourceError

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, MAXPOS, IMAGE, PATCH = 128, 64, 2, 4, 2, 128, 64, 32, 8
BATCH, SEQUENCE = 8, 16

Inputs = dict[str, torch.Tensor]
MakeInputs = Callable[[], Inputs]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _ids(seed: int) -> torch.Tensor:
    """Token ids from 3 on: those below are padding, start and end."""
    return torch.randint(3, VOCAB, (BATCH, SEQUENCE), generator=_generator(seed))


def _mask() -> torch.Tensor:
    return torch.ones(BATCH, SEQUENCE, dtype=torch.long)


def inputs_causal() -> Inputs:
    return {"input_ids": _ids(0)}


def inputs_masked() -> Inputs:
    return {"input_ids": _ids(0), "attention_mask": _mask()}


inputs_electra = inputs_masked


def inputs_seq2seq() -> Inputs:
    return {"input_ids": _ids(0), "attention_mask": _mask(), "decoder_input_ids": _ids(1)}


def inputs_image() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE, generator=_generator(0))}


def inputs_clip() -> Inputs:
    ids = _ids(0)
    ids[:, -1] = 2  # the end-of-text token, which CLIP pools
    return {"input_ids": ids, "pixel_values": inputs_image()["pixel_values"], "attention_mask": _mask()}


def inputs_whisper() -> Inputs:
    return {"input_features": torch.randn(BATCH, 8, 64, generator=_generator(0)), "decoder_input_ids": _ids(1)}


_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    max_position_embeddings=MAXPOS,
    attention_dropout=0.0,
    use_cache=False,
    tie_word_embeddings=False,
    **_IDS,
)
_GPT2 = dict(
    vocab_size=VOCAB,
    n_positions=MAXPOS,
    n_embd=HIDDEN,
    n_layer=LAYERS,
    n_head=HEADS,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    use_cache=False,
    **_IDS,
)
_BERT = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=FFN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    max_position_embeddings=MAXPOS,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    **_IDS,
)
_VIT = {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 8,
}


_LLAMA_OWN_HEADS = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}


TABLE: dict[str, tuple[str, str, dict[str, Any], MakeInputs]] = {
    # decoder-only, learned or ALiBi positions
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2, inputs_causal),
    "gpt_neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        dict(
            vocab_size=VOCAB,
            max_position_embeddings=MAXPOS,
            hidden_size=HIDDEN,
            num_layers=LAYERS,
            num_heads=HEADS,
            intermediate_size=FFN,
            window_size=8,
            attention_types=[[["global", "local"], 1]],
            resid_dropout=0.0,
            embed_dropout=0.0,
            attention_dropout=0.0,
            use_cache=False,
            **_IDS,
        ),
        inputs_causal,
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", dict(_LLAMA_OWN_HEADS, hidden_dropout=0.0), inputs_causal),
    "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", dict(_GPT2, multi_query=True), inputs_causal),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            ffn_dim=FFN,
            num_hidden_layers=LAYERS,
            word_embed_proj_dim=HIDDEN,
            num_attention_heads=HEADS,
            max_position_embeddings=MAXPOS,
            dropout=0.0,
            attention_dropout=0.0,
            layerdrop=0.0,
            use_cache=False,
            **_IDS,
        ),
        inputs_causal,
    ),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cache=False,
            **_IDS,
        ),
        inputs_causal,
    ),
    # decoder-only, rotary
    "llama": ("LlamaConfig", "LlamaForCausalLM", _LLAMA, inputs_causal),
    "mistral": ("MistralConfig", "MistralForCausalLM", dict(_LLAMA, sliding_window=8), inputs_causal),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _LLAMA, inputs_causal),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", dict(_LLAMA, head_dim=16), inputs_causal),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", dict(_LLAMA, head_dim=16), inputs_causal),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        dict(_LLAMA, resid_pdrop=0.0, embd_pdrop=0.0, original_max_position_embeddings=MAXPOS),
        inputs_causal,
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _LLAMA, inputs_causal),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", dict(_LLAMA, hidden_dropout=0.0), inputs_causal),
    # mixture of experts
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        dict(_LLAMA, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.0),
        inputs_causal,
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        dict(
            _LLAMA,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=FFN // 2,
            decoder_sparse_step=1,
        ),
        inputs_causal,
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        dict(
            _LLAMA,
            num_key_value_heads=HEADS,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=FFN // 2,
            first_k_dense_replace=1,
            q_lora_rank=32,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
        ),
        inputs_causal,
    ),
    # state space
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            state_size=8,
            expand=2,
            conv_kernel=4,
            use_cache=False,
            **_IDS,
        ),
        inputs_causal,
    ),
    # encoder-only
    "bert": ("BertConfig", "BertForMaskedLM", _BERT, inputs_masked),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", _BERT, inputs_masked),
    "electra": ("ElectraConfig", "ElectraForPreTraining", dict(_BERT, embedding_size=HIDDEN), inputs_electra),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        dict(
            vocab_size=VOCAB,
            dim=HIDDEN,
            hidden_dim=FFN,
            n_layers=LAYERS,
            n_heads=HEADS,
            max_position_embeddings=MAXPOS,
            dropout=0.0,
            attention_dropout=0.0,
            **_IDS,
        ),
        inputs_masked,
    ),
    # encoder-decoder
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "d_kv": 16,
            "d_ff": FFN,
            "num_layers": LAYERS,
            "num_decoder_layers": LAYERS,
            "num_heads": HEADS,
            "dropout_rate": 0.0,
            "use_cache": False,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 2,
        },
        inputs_seq2seq,
    ),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        dict(
            vocab_size=VOCAB,
            num_mel_bins=8,
            d_model=HIDDEN,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=FFN,
            decoder_ffn_dim=FFN,
            max_source_positions=32,
            max_target_positions=MAXPOS,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
            use_cache=False,
            apply_spec_augment=False,
            decoder_start_token_id=1,
            **_IDS,
        ),
        inputs_whisper,
    ),
    # vision, audio, two towers
    "vit": ("ViTConfig", "ViTForImageClassification", _VIT, inputs_image),
    "clip": (
        "CLIPConfig",
        "CLIPModel",
        {
            "text_config": dict(
                vocab_size=VOCAB,
                hidden_size=HIDDEN,
                intermediate_size=FFN,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                max_position_embeddings=MAXPOS,
                attention_dropout=0.0,
                **_IDS,
            ),
            "vision_config": {
                "hidden_size": HIDDEN,
                "intermediate_size": FFN,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": HEADS,
                "image_size": IMAGE,
                "patch_size": PATCH,
                "attention_dropout": 0.0,
            },
            "projection_dim": HIDDEN,
        },
        inputs_clip,
    ),
    "convnext": (
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {
            "hidden_sizes": [32, 64],
            "depths": [1, 1],
            "num_stages": 2,
            "patch_size": 4,
            "drop_path_rate": 0.0,
            "num_labels": 8,
        },
        inputs_image,
    ),
    "resnet": (
        "ResNetConfig",
        "ResNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "num_labels": 8},
        inputs_image,
    ),
}


def make(name: str) -> tuple[nn.Module, Inputs]:
    """A model in training mode, with the same weights every time, and its inputs."""
    try:
        import transformers
    except ImportError as error:
        raise ModelSourceError("the zoo needs transformers", fix="pip install 'autopar[test]'") from error
    if name not in TABLE:
        raise ModelSourceError(f"the zoo has no {name!r}", fix=f"choose from {', '.join(TABLE)}")
    config_name, model_name, overrides, make_inputs = TABLE[name]
    config = getattr(transformers, config_name)(**overrides)
    torch.manual_seed(1234)
    model: nn.Module = getattr(transformers, model_name)._from_config(config, dtype=torch.float32)
    return model.train(), make_inputs()
