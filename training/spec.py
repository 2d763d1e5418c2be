"""The numbers of the embedded checkpoint: its networks, its schedule and the seeds it grew from."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase, Qwen2VLImageProcessorPil, Qwen3VLConfig

from models.config import TransformerConfig, VaeConfig

SEED = 20260
RESOLUTION_PX = 256
PATCH_PX = 16
GRID_SIDE = RESOLUTION_PX // PATCH_PX
NUM_STEPS = 28
VOCABULARY = 640
SHIFT = 0.6  # exponent of the sigma shift at GRID_SIDE² target tokens

TRANSFORMER = TransformerConfig(
    in_channels=16,
    out_channels=16,
    num_layers=8,
    attention_head_dim=48,
    num_attention_heads=4,
    context_in_dim=128,
    mlp_ratio=2,
    axes_dims_rope=(8, 20, 20),
)
VAE = VaeConfig(
    base_dim=16,
    decoder_base_dim=24,
    z_dim=16,
    dim_mult=(1, 2, 4, 4, 4),
    num_res_blocks=1,
    temperal_downsample=(False, False, False, False),
    latents_mean=(0.0,) * 16,
    latents_std=(1.0,) * 16,
)
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "_diffusers_version": "0.42.1",
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "use_dynamic_shifting": True,
    "time_shift_type": "exponential",
    "base_shift": SHIFT,
    "max_shift": 1.2,
    "base_image_seq_len": GRID_SIDE**2,
    "max_image_seq_len": 4096,
    "shift_terminal": None,
}


def text_encoder_config(tokenizer: PreTrainedTokenizerBase) -> Qwen3VLConfig:
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": TRANSFORMER.context_in_dim,
            "intermediate_size": 320,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": TRANSFORMER.context_in_dim,
            "num_position_embeddings": GRID_SIDE**2,
            "deepstack_visual_indexes": [0],
            "patch_size": PATCH_PX,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def image_processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH_PX,
        merge_size=2,
        temporal_patch_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 32 * 32, "longest_edge": 4096 * 4096},
    )
