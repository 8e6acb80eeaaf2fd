"""Families that write text, most used first, as in docs/models.md."""

from tests.families.family import CHUNK, HEAD_WIDTH, HEADS, HIDDEN, KV_HEADS, WINDOW, Family

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN // 2}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN // 2}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    "linear_key_head_dim": HEAD_WIDTH,
    "linear_value_head_dim": HEAD_WIDTH,
    "linear_num_key_heads": KV_HEADS,
    "linear_num_value_heads": HEADS,
}
"""Gated delta nets: three layers of four keep a state."""
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": HEAD_WIDTH,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 64,
}
NEMOTRON = {
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": HEAD_WIDTH,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 64,
    "moe_shared_expert_intermediate_size": HIDDEN // 2,
    **ROUTED,
}
LATENT = {
    "num_key_value_heads": HEADS,
    "head_dim": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    **ROUTED,
}
"""Latent vectors of the width that vLLM's CPU kernel knows."""
CONVOLUTION = {"conv_L_cache": 3, "tie_word_embeddings": True, "head_dim": None}
OF_CONVOLUTION = {"conv_dim": HIDDEN, "conv_dim_out": HIDDEN, "block_dim": HIDDEN, "block_ff_dim": 2 * HIDDEN}
GEMMA = {"sliding_window": WINDOW, "num_hidden_layers": 6, "layer_types": [SLIDING, SLIDING, FULL] * 2}
CPU_MLA = {"block_size": 16, "attention_backend": "CPU_MLA"}

TEXTS = {
    "qwen3_5": Family("Qwen3_5Text", "Qwen3_5ForCausalLM", {"num_hidden_layers": 8, **DELTA}),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeText",
        "Qwen3_5MoeForCausalLM",
        {"num_hidden_layers": 4, "shared_expert_intermediate_size": HIDDEN // 2, **EXPERTS, **DELTA},
    ),
    "gemma4": Family(  # as the 26B and the 31B: in the full layers keys are the values, half as many bytes a token
        "Gemma4Text",
        "Gemma4ForCausalLM",
        GEMMA
        | {"num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS, "hidden_size_per_layer_input": 0}
        | {"global_head_dim": 2 * HEAD_WIDTH, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    ),
    "gemma4_e": Family(  # as the E4B: the last layers read KV of earlier ones, and each layer has an input of its own
        "Gemma4Text",
        "Gemma4ForCausalLM",
        {"sliding_window": WINDOW, "num_hidden_layers": 8, "layer_types": [SLIDING, FULL] * 4}
        | {"global_head_dim": 2 * HEAD_WIDTH, "num_kv_shared_layers": 4}
        | {"vocab_size_per_layer_input": 2048, "hidden_size_per_layer_input": 32},
    ),
    "gpt_oss": Family(
        "GptOss",
        "GptOssForCausalLM",
        {"intermediate_size": HIDDEN, "num_hidden_layers": 4, "sliding_window": CHUNK, **LOCAL}
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            }
        },
    ),
    "qwen3": Family("Qwen3", "Qwen3ForCausalLM", {"num_hidden_layers": 3}),
    "qwen3_moe": Family("Qwen3Moe", "Qwen3MoeForCausalLM", {"num_hidden_layers": 3, **EXPERTS}),
    "llama3": Family(
        "Llama",
        "LlamaForCausalLM",
        {"num_hidden_layers": 3}
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    "gemma3": Family("Gemma3Text", "Gemma3ForCausalLM", GEMMA | {"query_pre_attn_scalar": HEAD_WIDTH}),
    "glm4_moe_lite": Family(
        "Glm4MoeLite",
        "Glm4MoeLiteForCausalLM",
        {"num_hidden_layers": 3, "q_lora_rank": 96, **LATENT},
        {"first_k_dense_replace": 1},
        CPU_MLA,
    ),
    "ministral3": Family("Ministral3", "Ministral3ForCausalLM", {"num_hidden_layers": 3}),
    "nemotron_h": Family(
        "NemotronH",
        "NemotronHForCausalLM",
        NEMOTRON | {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba"]},
    ),
    "nemotron_h_moe": Family(  # as the Nemotron 3 Nano; vLLM's CPU build has no such experts
        "NemotronH",
        "NemotronHForCausalLM",
        NEMOTRON | {"layers_block_type": ["mamba", "moe", "mamba", "attention", "moe", "mamba"]},
    ),
    "deepseek_v3": Family(
        "DeepseekV3",
        "DeepseekV3ForCausalLM",
        {"num_hidden_layers": 3, "q_lora_rank": None, "first_k_dense_replace": 1, **LATENT},
        {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
        CPU_MLA,
    ),
    "qwen3_next": Family(
        "Qwen3Next",
        "Qwen3NextForCausalLM",
        {"num_hidden_layers": 4, "shared_expert_intermediate_size": HIDDEN // 2, **EXPERTS, **DELTA},
    ),
    "granite4_h": Family(
        "GraniteMoeHybrid",
        "GraniteMoeHybridForCausalLM",
        {"intermediate_size": HIDDEN // 2, "shared_intermediate_size": HIDDEN, "head_dim": None}
        | {"num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"]}
        | {"attention_multiplier": HEAD_WIDTH**-0.5, **LOCAL, **MAMBA2},
    ),
    "lfm2": Family(
        "Lfm2",
        "Lfm2ForCausalLM",
        CONVOLUTION | {"num_hidden_layers": 6, "layer_types": ["conv", "conv", FULL, "conv", FULL, "conv"]},
        OF_CONVOLUTION,
    ),
    "lfm2_moe": Family(
        "Lfm2Moe",
        "Lfm2MoeForCausalLM",
        CONVOLUTION
        | {"num_hidden_layers": 4, "layer_types": ["conv", "conv", FULL, "conv"], "num_dense_layers": 2, **EXPERTS},
    ),
    "phi4": Family("Phi3", "Phi3ForCausalLM", {"num_hidden_layers": 3}),
    "seed_oss": Family("SeedOss", "SeedOssForCausalLM", {"num_hidden_layers": 3}),
    "ernie4_5": Family("Ernie4_5", "Ernie4_5ForCausalLM", {"num_hidden_layers": 3}),
    "olmo3": Family("Olmo3", "Olmo3ForCausalLM", {"num_hidden_layers": 4, "sliding_window": WINDOW}),
    "glm4_moe": Family("Glm4Moe", "Glm4MoeForCausalLM", {"num_hidden_layers": 3, "use_qk_norm": True, **ROUTED}),
    "minimax_m2": Family(
        "MiniMaxM2",
        "MiniMaxM2ForCausalLM",
        {"num_hidden_layers": 3, "intermediate_size": HIDDEN // 2, "rotary_dim": HEAD_WIDTH // 2, **LOCAL},
        {"rotary_dim": HEAD_WIDTH // 2, "scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "llama4": Family(
        "Llama4Text",
        "Llama4ForCausalLM",
        {"intermediate_size": HIDDEN, "intermediate_size_mlp": 2 * HIDDEN, "num_hidden_layers": 4}
        | {"num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": CHUNK},
    ),
    # Not of the twenty.
    "falcon_h1": Family(  # in every layer a state beside the attention
        "FalconH1", "FalconH1ForCausalLM", {"num_hidden_layers": 3, "mamba_d_ssm": 2 * HIDDEN, **MAMBA2}
    ),
    "mamba": Family(  # states alone
        "Mamba",
        "MambaForCausalLM",
        {"num_hidden_layers": 4, "state_size": 16, "expand": 2, "conv_kernel": 4, "intermediate_size": None},
    ),
    "mamba2": Family(
        "Mamba2",
        "Mamba2ForCausalLM",
        {"num_hidden_layers": 4, "num_heads": 8, "state_size": 16, "n_groups": 1, "chunk_size": 64, "expand": 2}
        | {"intermediate_size": None, "head_dim": HEAD_WIDTH},
    ),
    "jamba": Family(  # Mamba 1 beside attention
        "Jamba",
        "JambaForCausalLM",
        {"num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 16, "head_dim": None}
        | {"num_experts": 4, "num_experts_per_tok": 2},
    ),
    "falcon_mamba": Family(
        "FalconMamba",
        "FalconMambaForCausalLM",
        {"num_hidden_layers": 4, "state_size": 16, "expand": 2, "conv_kernel": 4, "intermediate_size": None},
    ),
    "zamba2": Family(  # Mamba 2 in every layer, and one attention whose weights several layers share
        "Zamba2",
        "Zamba2ForCausalLM",
        {"num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid"] * 3, "num_mem_blocks": 1, "head_dim": None}
        | {"mamba_d_state": 16, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 64, "use_mem_rope": True}
        | {"num_key_value_heads": HEADS, "adapter_rank": 8, "tie_word_embeddings": True},
        spread=0.05,
    ),
    "olmo_hybrid": Family(  # vLLM has no path for it on a CPU
        "OlmoHybrid", "OlmoHybridForCausalLM", {"num_hidden_layers": 4, "head_dim": None, **DELTA}
    ),
    "stablelm": Family("StableLm", "StableLmForCausalLM", {"num_hidden_layers": 3, "head_dim": None}),
    "minicpm3": Family(  # latent vectors that vLLM keeps as plain keys and values
        "MiniCPM3",
        "MiniCPM3ForCausalLM",
        {"num_hidden_layers": 3, "q_lora_rank": 96, "kv_lora_rank": 64, "num_key_value_heads": HEADS, "head_dim": None}
        | {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": HEAD_WIDTH},
    ),
    "gpt2": Family(  # positions that were learned
        "GPT2", "GPT2LMHeadModel", {"num_hidden_layers": 3, "tie_word_embeddings": True}, spread=0.05
    ),
    "olmo2": Family("Olmo2", "Olmo2ForCausalLM", {"num_hidden_layers": 3}),  # by transformers' own code
    "gemma2": Family(
        "Gemma2",
        "Gemma2ForCausalLM",
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "query_pre_attn_scalar": HEAD_WIDTH}
        | {"tie_word_embeddings": True},
        spread=0.05,  # it multiplies what it reads, and its head does not
    ),
    "cohere2": Family(
        "Cohere2", "Cohere2ForCausalLM", {"num_hidden_layers": 4, "sliding_window": WINDOW, "tie_word_embeddings": True}
    ),
    "exaone4": Family("Exaone4", "Exaone4ForCausalLM", {"num_hidden_layers": 4, "sliding_window": WINDOW}),
    "smollm3": Family("SmolLM3", "SmolLM3ForCausalLM", {"num_hidden_layers": 4}),
    "mixtral": Family("Mixtral", "MixtralForCausalLM", {"num_hidden_layers": 3, **LOCAL}),
    "deepseek_v2": Family(
        "DeepseekV2",
        "DeepseekV2ForCausalLM",
        {"num_hidden_layers": 3, "q_lora_rank": None, "first_k_dense_replace": 1, "topk_method": "greedy", **LATENT},
        options=CPU_MLA,
    ),
    "granite": Family(
        "Granite",
        "GraniteForCausalLM",
        {"num_hidden_layers": 3, "attention_multiplier": HEAD_WIDTH**-0.5, "head_dim": None},
    ),
    "nemotron": Family("Nemotron", "NemotronForCausalLM", {"num_hidden_layers": 3}),
    "cohere": Family(
        "Cohere", "CohereForCausalLM", {"num_hidden_layers": 3, "tie_word_embeddings": True, "head_dim": None}
    ),
    "opt": Family(
        "OPT",
        "OPTForCausalLM",
        {"num_hidden_layers": 3, "ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN}
        | {"tie_word_embeddings": True, "head_dim": None},
        spread=0.05,
    ),
    "bloom": Family(  # no positions, but attention that fades with the distance
        "Bloom",
        "BloomForCausalLM",
        {"n_layer": 3, "n_head": HEADS, "tie_word_embeddings": True}
        | dict.fromkeys(("num_hidden_layers", "num_attention_heads", "head_dim")),
        spread=0.05,
    ),
    "falcon": Family(
        "Falcon",
        "FalconForCausalLM",
        {"num_hidden_layers": 3, "new_decoder_architecture": True, "num_kv_heads": KV_HEADS, "head_dim": None}
        | {"ffn_hidden_size": 4 * HIDDEN, "bias": False},
    ),
    "gptj": Family(
        "GPTJ",
        "GPTJForCausalLM",
        {"n_layer": 3, "n_head": HEADS, "n_embd": HIDDEN, "rotary_dim": 16, "n_positions": 2048}
        | dict.fromkeys(("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")),
    ),
    "qwen2_moe": Family(
        "Qwen2Moe",
        "Qwen2MoeForCausalLM",
        {"num_hidden_layers": 3, "shared_expert_intermediate_size": HIDDEN // 2, **EXPERTS},
    ),
    "olmoe": Family(
        "Olmoe",
        "OlmoeForCausalLM",
        {"num_hidden_layers": 3, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": HIDDEN // 2},
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_Moe",
        "Ernie4_5_MoeForCausalLM",
        {"num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": HIDDEN // 2}
        | {"moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 2},
    ),
    "exaone_moe": Family(
        "ExaoneMoe", "ExaoneMoeForCausalLM", {"num_hidden_layers": 4, "sliding_window": WINDOW, **EXPERTS}
    ),
    "mistral": Family("Mistral", "MistralForCausalLM", {"num_hidden_layers": 3, "sliding_window": WINDOW}),
    "starcoder2": Family("Starcoder2", "Starcoder2ForCausalLM", {"num_hidden_layers": 3, "sliding_window": None}),
    "gpt_neox": Family(
        "GPTNeoX", "GPTNeoXForCausalLM", {"num_hidden_layers": 3, "num_key_value_heads": None, "head_dim": None}
    ),
    "kimi_linear": Family(  # vLLM has no path for it on a CPU
        "KimiLinear",
        "KimiLinearForCausalLM",
        {"num_hidden_layers": 4, "linear_head_dim": HEAD_WIDTH, "linear_num_heads": HEADS, **LATENT}
        | {"n_routed_experts": None, "num_local_experts": 4},
    ),
}
