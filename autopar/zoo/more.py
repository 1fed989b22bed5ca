"""More architectures of the transformers library, beyond the zoo's own: shrunk by rule, one layer or two.

`SMALL` holds a small value for each size that configurations have; what a configuration lacks is left out, dropout of
any name is 0, and an entry's own overrides come last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import ModelSourceError

VOCAB, HIDDEN, HEADS, FFN, BATCH, SEQUENCE, IMAGE, PATCH = 96, 32, 4, 48, 8, 8, 32, 8
Inputs = dict[str, Tensor]

SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("vocab_size", "n_vocab"), VOCAB),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "d_embed", "embedding_size", "projection_dim",
         "embed_dim", "encoder_hidden_size", "image_text_hidden_size", "word_embed_proj_dim", "decoder_hidden_size",
         "lru_width", "attention_hidden_size", "text_embed_dim"), HIDDEN,
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
         "num_decoder_layers", "num_encoder_layers", "decoder_num_hidden_layers"), 1,
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
         "num_encoder_attention_heads", "num_decoder_attention_heads", "decoder_num_attention_heads"), HEADS,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "kv_n_heads"), 2),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim", "n_inner", "d_inner",
         "d_ff", "ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size",
         "decoder_intermediate_size", "dense_intermediate_size", "moe_dense_intermediate_size"), FFN,
    ),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "kv_channels", "attention_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_source_positions",
         "max_target_positions", "max_sequence_length"), 64,
    ),
    "image_size": IMAGE, "patch_size": PATCH, "num_labels": 8, "use_cache": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "apply_spec_augment": False, "vocab_size_per_layer_input": VOCAB,
    "layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(seed: int = 0, length: int = SEQUENCE, low: int = 3) -> Tensor:
    """Tokens that stand for nothing special."""
    return torch.randint(low, VOCAB, (BATCH, length), generator=generator(seed))


def causal() -> Inputs:
    return {"input_ids": ids(), "labels": ids()}


def logits() -> Inputs:
    """No labels: the loss is computed outside."""
    return {"input_ids": ids()}


def masked() -> Inputs:
    """Padding on the right in half of the batch."""
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
    mask[::2, -2:] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def long() -> Inputs:
    return {"input_ids": ids(length=32)}


def seq2seq() -> Inputs:
    return {"input_ids": ids(), "decoder_input_ids": ids(1)}


def image() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator(0))}


def small_image() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, 8, 8, generator=generator(0))}


def large_image() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, 64, 64, generator=generator(0))}


def video() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 2, 3, IMAGE, IMAGE, generator=generator(0))}


def masked_patches() -> Inputs:
    patches = (IMAGE // PATCH) ** 2
    order = torch.rand(BATCH, patches, generator=generator(1)).argsort(1)
    return {**image(), "bool_masked_pos": (order < patches // 2)}


def noise() -> Inputs:
    patches = (IMAGE // PATCH) ** 2
    return {**image(), "noise": torch.rand(BATCH, patches, generator=generator(1))}


def pair() -> Inputs:
    return {**masked(), **image()}


def clip_pair() -> Inputs:
    text = ids()
    text[:, -1] = 2
    return {"input_ids": text, **image()}


def wave() -> Inputs:
    return {"input_values": torch.randn(BATCH, 800, generator=generator(0))}


def spectrogram() -> Inputs:
    return {"input_values": torch.randn(BATCH, 32, 16, generator=generator(0))}


def features() -> Inputs:
    return {"input_features": torch.randn(BATCH, 8, 64, generator=generator(0)), "decoder_input_ids": ids(1)}


def frames() -> Inputs:
    return {"input_features": torch.randn(BATCH, 32, 8, generator=generator(0)), "decoder_input_ids": ids(1)}


def series() -> Inputs:
    return {"past_values": torch.randn(BATCH, 32, 2, generator=generator(0))}


LM, MLM, SEQ2SEQ, CLASSES = "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForImageClassification"
_MAMBA = {"state_size": 8, "expand": 2, "conv_kernel": 4, "num_hidden_layers": 2}
_SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4}
_STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1]}
_SPEECH = {
    "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 4], "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
}  # fmt: skip
_TOWERS = {"projection_dim": HIDDEN}

Entry = tuple[str, str, dict[str, Any], Callable[[], Inputs]]  # stem of the classes, head, overrides, inputs
MORE: Mapping[str, Entry] = {
    # decoders
    "gemma2": ("Gemma2", LM, {"num_hidden_layers": 2, "sliding_window": 4}, causal),
    "gemma3": ("Gemma3Text:Gemma3", LM, {"num_hidden_layers": 2, "sliding_window": 4}, causal),
    "falcon": ("Falcon", LM, {}, causal),
    "falcon_alibi": ("Falcon", LM, {"alibi": True, "new_decoder_architecture": True}, logits),
    "gptj": ("GPTJ", LM, {"rotary_dim": 4}, causal),
    "mpt": ("Mpt", LM, {"attn_config": {}}, causal),
    "codegen": ("CodeGen", LM, {"rotary_dim": 4}, causal),
    "openai_gpt": ("OpenAIGPT", "LMHeadModel", {}, causal),
    "ctrl": ("CTRL", "LMHeadModel", {"dff": FFN}, causal),
    "xglm": ("XGLM", LM, {"attention_heads": HEADS}, causal),
    "biogpt": ("BioGpt", LM, {}, causal),
    "granite": ("Granite", LM, {}, causal),
    "olmo": ("Olmo", LM, {"clip_qkv": 8.0}, causal),
    "olmo3": ("Olmo3", LM, {"num_hidden_layers": 2, "sliding_window": 4}, causal),
    "cohere": ("Cohere", LM, {}, causal),
    "cohere2": ("Cohere2", LM, {"num_hidden_layers": 2, "sliding_window": 4}, causal),
    "starcoder2": ("Starcoder2", LM, {}, causal),
    "glm": ("Glm", LM, {}, causal),
    "glm4": ("Glm4", LM, {}, causal),
    "minicpm3": ("MiniCPM3", LM, {"num_key_value_heads": HEADS, "q_lora_rank": 16, "kv_lora_rank": 8,
                 "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}, causal),
    "phi": ("Phi", LM, {}, causal),
    "persimmon": ("Persimmon", LM, {}, causal),
    "nemotron": ("Nemotron", LM, {}, causal),
    "smollm3": ("SmolLM3", LM, {"num_hidden_layers": 2, "no_rope_layers": [1, 0]}, causal),
    "helium": ("Helium", LM, {}, causal),
    "ernie4_5": ("Ernie4_5", LM, {}, causal),
    "exaone4": ("Exaone4", LM, {"num_hidden_layers": 2, "sliding_window": 4}, causal),
    "diffllama": ("DiffLlama", LM, {}, causal),
    "bitnet": ("BitNet", LM, {}, causal),
    "seed_oss": ("SeedOss", LM, {}, causal),
    "hunyuan_dense": ("HunYuanDenseV1", LM, {}, causal),
    "apertus": ("Apertus", LM, {}, causal),
    "arcee": ("Arcee", LM, {}, causal),
    "xlnet": ("XLNet", "LMHeadModel", {"d_head": 8}, logits),
    # experts
    "qwen2_moe": ("Qwen2Moe", LM, {"decoder_sparse_step": 1}, causal),
    "olmoe": ("Olmoe", LM, {}, causal),
    "gpt_oss": ("GptOss", LM, {"num_hidden_layers": 2, "sliding_window": 4}, causal),
    "phimoe": ("Phimoe", LM, {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}, causal),
    "granitemoe": ("GraniteMoe", LM, {}, causal),
    "jetmoe": ("JetMoe", LM, {"num_key_value_heads": 2}, causal),
    "dbrx": ("Dbrx", LM, {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": FFN, "moe_num_experts": 4, "moe_top_k": 2}}, causal),
    "deepseek_v2": (
        "DeepseekV2", LM, {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
         "num_key_value_heads": HEADS, "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1}, causal,
    ),
    "glm4_moe": ("Glm4Moe", LM, {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_group": 1}, causal),
    "ernie4_5_moe": ("Ernie4_5_Moe", LM, {"moe_k": 2, "num_hidden_layers": 2}, causal),
    "minimax": ("MiniMax", LM, {"num_hidden_layers": 2, "block_size": 4}, causal),
    "flex_olmo": ("FlexOlmo", LM, {}, causal),
    "llama4": ("Llama4Text:Llama4", LM, {"num_hidden_layers": 2, "intermediate_size_mlp": FFN}, causal),
    "switch_transformers": ("SwitchTransformers", SEQ2SEQ, {
        "router_jitter_noise": 0.0, "expert_capacity": 9, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1}, seq2seq),
    "nllb_moe": ("NllbMoe", SEQ2SEQ, {"expert_capacity": 64, "encoder_sparse_step": 1, "decoder_sparse_step": 1},
                 seq2seq),
    # state space, recurrent, linear attention
    "mamba2": ("Mamba2", LM, {**_MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}, causal),
    "falcon_mamba": ("FalconMamba", LM, _MAMBA, causal),
    "rwkv": ("Rwkv", LM, {"attention_hidden_size": HIDDEN, "num_hidden_layers": 2}, causal),
    "jamba": (
        "Jamba", LM, {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
         "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}, causal,
    ),
    "recurrent_gemma": ("RecurrentGemma", LM, {"num_hidden_layers": 3, "attention_window_size": 8}, causal),
    "bamba": (
        "Bamba", LM, {"num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8,
         "mamba_d_state": 4, "mamba_chunk_size": 4}, causal,
    ),
    "qwen3_next": (
        "Qwen3Next", LM, {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
         "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
         "linear_value_head_dim": 8}, causal,
    ),
    "lfm2": ("Lfm2", LM, {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, causal),
    # encoders
    "albert": ("Albert", MLM, {"embedding_size": 16, "num_hidden_layers": 2}, masked),
    "deberta": ("Deberta", MLM, {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, masked),
    "deberta_v2": ("DebertaV2", MLM, {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, masked),
    "mpnet": ("MPNet", MLM, {}, masked),
    "longformer": ("Longformer", MLM, {"attention_window": 8}, long),
    "big_bird": ("BigBird", MLM, {"attention_type": "original_full"}, masked),
    "big_bird_sparse": ("BigBird", MLM, {"block_size": 2, "num_random_blocks": 1}, long),
    "funnel": ("Funnel", MLM, {"block_sizes": [1, 1], "num_decoder_layers": 1}, masked),
    "convbert": ("ConvBert", MLM, {"embedding_size": HIDDEN}, masked),
    "squeezebert": ("SqueezeBert", MLM, {}, masked),
    "mobilebert": ("MobileBert", MLM, {"true_hidden_size": 16, "intra_bottleneck_size": 16,
                   "embedding_size": 16}, masked),
    "nystromformer": ("Nystromformer", MLM, {"num_landmarks": 8, "segment_means_seq_len": 8}, logits),
    "roformer": ("RoFormer", MLM, {}, masked),
    "xlm": ("XLM", "WithLMHeadModel", {}, masked),
    "esm": ("Esm", MLM, {"token_dropout": False, "mask_token_id": 4, "position_embedding_type": "rotary"}, masked),
    "modernbert": ("ModernBert", MLM, {"num_hidden_layers": 2, "local_attention": 4}, masked),
    "fnet": ("FNet", MLM, {}, logits),
    "rembert": ("RemBert", MLM, {"input_embedding_size": 16, "output_embedding_size": 16}, masked),
    "layoutlm": ("LayoutLM", MLM, {}, masked),
    "canine": ("Canine", "ForSequenceClassification", {"local_transformer_stride": 4, "downsampling_rate": 4}, masked),
    "ibert": ("IBert", MLM, {}, masked),
    "perceiver": ("Perceiver", MLM, {"d_latents": 16, "num_latents": 8, "num_blocks": 1,
                  "num_self_attends_per_block": 1, "num_self_attention_heads": 4,
                  "num_cross_attention_heads": 4}, masked),
    "reformer": ("ReformerModelWith", "LMHead", {"is_decoder": True, "axial_pos_shape": [4, 8],
                 "axial_pos_embds_dim": [16, 16], "attn_layers": ["local"], "local_attn_chunk_length": 8}, long),
    # encoder-decoder
    "bart": ("Bart", SEQ2SEQ, {}, seq2seq),
    "mbart": ("MBart", SEQ2SEQ, {}, seq2seq),
    "pegasus": ("Pegasus", SEQ2SEQ, {}, seq2seq),
    "marian": ("Marian:MarianMT", "Model", {"decoder_vocab_size": VOCAB, "decoder_start_token_id": 0}, seq2seq),
    "blenderbot": ("Blenderbot", SEQ2SEQ, {}, seq2seq),
    "m2m_100": ("M2M100", SEQ2SEQ, {}, seq2seq),
    "led": ("LED", SEQ2SEQ, {"attention_window": 8, "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64}, seq2seq),
    "prophetnet": ("ProphetNet", SEQ2SEQ, {"ngram": 2, "num_buckets": 8, "relative_max_distance": 16}, seq2seq),
    "mt5": ("MT5", SEQ2SEQ, {"decoder_start_token_id": 0}, seq2seq),
    "longt5": ("LongT5", SEQ2SEQ, {"decoder_start_token_id": 0, "local_radius": 3}, seq2seq),
    "bigbird_pegasus": ("BigBirdPegasus", SEQ2SEQ, {"attention_type": "original_full"}, seq2seq),
    "speech_to_text": ("Speech2Text", SEQ2SEQ, {"input_feat_per_channel": 8, "conv_channels": 16,
                       "conv_kernel_sizes": [3, 3], "decoder_start_token_id": 1}, frames),
    # audio
    "wav2vec2": ("Wav2Vec2", "ForSequenceClassification", _SPEECH, wave),
    "hubert": ("Hubert", "ForSequenceClassification", _SPEECH, wave),
    "wavlm": ("WavLM", "ForSequenceClassification", {**_SPEECH, "num_buckets": 8, "max_bucket_distance": 9}, wave),
    "ast": ("AST", "ForAudioClassification", {"max_length": 32, "num_mel_bins": 16, "patch_size": 8,
            "frequency_stride": 8, "time_stride": 8}, spectrogram),
    # vision
    "deit": ("DeiT", CLASSES, {}, image),
    "beit": ("Beit", CLASSES, {"use_relative_position_bias": True}, image),
    "dinov2": ("Dinov2", CLASSES, {"mlp_ratio": 2}, image),
    "swin": ("Swin", CLASSES, _SWIN, image),
    "swinv2": ("Swinv2", CLASSES, _SWIN, image),
    "convnextv2": ("ConvNextV2", CLASSES, {"hidden_sizes": [16] * 4, "depths": [1] * 4, "patch_size": 4}, image),
    "segformer": (
        "Segformer", "ForSemanticSegmentation", {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
         "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
         "mlp_ratios": [2, 2], "decoder_hidden_size": 16}, image,
    ),
    "mobilenet_v1": ("MobileNetV1", CLASSES, {"depth_multiplier": 0.25}, large_image),
    "mobilenet_v2": ("MobileNetV2", CLASSES, {"depth_multiplier": 0.25}, large_image),
    "mobilevit": ("MobileViT", CLASSES, {"image_size": 64, "patch_size": 2, "hidden_sizes": [16, 16, 16],
                  "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32]}, large_image),
    "regnet": ("RegNet", CLASSES, {"embedding_size": 16, "hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1],
               "groups_width": 8}, image),
    "bit": ("Bit", CLASSES, {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_groups": 4}, image),
    "levit": ("Levit", CLASSES, {"hidden_sizes": [16, 32, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
              "key_dim": [8, 8, 8], "image_size": 64, "patch_size": 16, "drop_path_rate": 0}, large_image),
    "poolformer": ("PoolFormer", CLASSES, {"depths": [1, 1], "hidden_sizes": [16, 32], "num_encoder_blocks": 2,
                   "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1]}, image),
    "cvt": ("Cvt", CLASSES, {"embed_dim": [16, 32], "num_heads": [2, 2], "depth": [1, 2], "patch_sizes": [7, 3],
            "patch_stride": [4, 2], "patch_padding": [2, 1], "mlp_ratio": [2.0, 2.0], "attention_drop_rate": [0.0, 0.0],
            "drop_rate": [0.0, 0.0], "drop_path_rate": [0.0, 0.0], "qkv_bias": [True, True], "cls_token": [False, True],
            "qkv_projection_method": ["dw_bn"] * 2, "kernel_qkv": [3, 3], "padding_kv": [1, 1], "stride_kv": [2, 2],
            "padding_q": [1, 1], "stride_q": [1, 1]}, image),
    "pvt": ("Pvt", CLASSES, {"num_encoder_blocks": 2, "depths": [1, 1], "sequence_reduction_ratios": [2, 1],
            "hidden_sizes": [16, 32], "patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [2, 2],
            "mlp_ratios": [2, 2]}, image),
    "focalnet": ("FocalNet", CLASSES, {"embed_dim": 16, "depths": [1, 1], "focal_levels": [1, 1],
                 "focal_windows": [3, 3], "patch_size": 4, "hidden_sizes": [16, 32]}, image),
    "efficientnet": ("EfficientNet", CLASSES, {"width_coefficient": 0.5, "depth_coefficient": 0.3, "hidden_dim": 640,
                     "drop_connect_rate": 0.0}, image),
    "swiftformer": ("SwiftFormer", CLASSES, {"depths": [1, 1, 1, 1], "embed_dims": [16, 16, 32, 32],
                    "drop_path_rate": 0.0}, image),
    "hiera": ("Hiera", CLASSES, {"embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "embed_dim_multiplier": 2.0,
              "patch_size": [7, 7], "patch_stride": [4, 4], "patch_padding": [3, 3], "num_query_pool": 1,
              "query_stride": [2, 2], "masked_unit_size": [2, 2], "masked_unit_attention": [True, False],
              "image_size": [32, 32]}, image),
    "vit_mae": ("ViTMAE", "ForPreTraining", {}, noise),
    "vit_msn": ("ViTMSN", CLASSES, {}, image),
    "ijepa": ("IJepa", CLASSES, {}, image),
    "simmim": ("ViT", "ForMaskedImageModeling", {"encoder_stride": PATCH}, masked_patches),
    "glpn": ("GLPN", "ForDepthEstimation", {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
             "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2],
             "mlp_ratios": [2, 2], "decoder_hidden_size": 16}, image),
    "yolos": ("Yolos", "ForObjectDetection", {"num_detection_tokens": 4, "image_size": [32, 32]}, image),
    "detr": (
        "Detr", "ForObjectDetection", {"num_queries": 4, "use_timm_backbone": False, "use_pretrained_backbone": False,
         "backbone": None, "backbone_config": {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32],
         "depths": [1, 1], "out_features": ["stage2"]}}, image,
    ),
    "swin2sr": ("Swin2SR", "ForImageSuperResolution", {"embed_dim": 16, "depths": [1], "num_heads": [2],
                "window_size": 4, "patch_size": 1, "image_size": 8, "upscale": 2},
                small_image),
    "timesformer": ("Timesformer", "ForVideoClassification", {"num_frames": 2, "drop_path_rate": 0}, video),
    "videomae": ("VideoMAE", "ForVideoClassification", {"num_frames": 2, "tubelet_size": 2}, video),
    "vivit": ("Vivit", "ForVideoClassification", {"num_frames": 2, "tubelet_size": [2, 8, 8]}, video),
    # two towers, text with images
    "siglip": ("Siglip", "Model", {}, clip_pair),
    "chinese_clip": ("ChineseCLIP", "Model", _TOWERS, clip_pair),
    "altclip": ("AltCLIP", "Model", _TOWERS, clip_pair),
    "blip": ("Blip", SEQ2SEQ, _TOWERS, pair),
    "git": ("Git", LM, {}, lambda: {**logits(), **image()}),
    "vilt": ("Vilt", "ForQuestionAnswering", {}, pair),
    "clipseg": ("CLIPSeg", "ForImageSegmentation", {**_TOWERS, "reduce_dim": 16, "extract_layers": [0],
                "decoder_num_attention_heads": 2}, clip_pair),
    "owlvit": ("OwlViT", "Model", _TOWERS, clip_pair),
    # series
    "patchtst": ("PatchTST", "ForPrediction", {"num_input_channels": 2, "context_length": 32, "patch_length": 8,
                 "patch_stride": 8, "prediction_length": 4, "do_mask_input": False}, series),
    "patchtsmixer": ("PatchTSMixer", "ForPrediction", {"num_input_channels": 2, "context_length": 32, "patch_length": 8,
                     "patch_stride": 8, "prediction_length": 4}, series),
}  # fmt: skip


# Batch norm over the few values that small pictures leave amplifies float32's rounding past what is allowed.
IN_DOUBLE = frozenset(("mobilenet_v1", "mobilenet_v2", "mobilevit"))


def make_more(name: str) -> tuple[nn.Module, Inputs]:
    """A model of `MORE` in training mode, with the same weights every time, and its inputs."""
    import transformers

    if name not in MORE:
        raise ModelSourceError(f"there is no architecture {name!r}", fix=f"choose from {', '.join(MORE)}")
    stem, head, overrides, inputs = MORE[name]
    config_stem, _, model_stem = stem.partition(":")
    kind = getattr(transformers, f"{config_stem.removesuffix('ModelWith')}Config")
    config = kind(**small_options(kind, overrides))
    torch.manual_seed(1234)
    model: nn.Module = getattr(transformers, f"{model_stem or config_stem}{head}")._from_config(
        config, dtype=torch.float32
    )
    if name not in IN_DOUBLE:
        return model.train(), inputs()
    return model.double().train(), {key: item.double() for key, item in inputs().items()}


def small_options(kind: Any, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The options that make a configuration of that class small, its parts' included."""
    own = {name: value for name, value in vars(kind()).items() if not name.startswith("_")}
    aliases = {*getattr(kind, "attribute_map", {})}
    options = {name: SMALL[name] for name in SMALL if name in own or name in aliases}
    aliased = {kind.attribute_map[name] for name in aliases if name in options and kind.attribute_map[name] in options}
    for name in [name for name in options if name in aliases and kind.attribute_map[name] in aliased]:
        del options[name]
    options |= {name: 0.0 for name, value in own.items() if "drop" in name and _is_rate(value)}
    for name, part in getattr(kind, "sub_configs", {}).items():
        if name not in overrides and isinstance(part, type) and hasattr(part, "model_type"):
            options[name] = small_options(part, {})
    return {**options, **overrides}


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value <= 1
