"""Families that embed, score or classify: encoders keep no KV at all, decoders do."""

from tests.families.family import HIDDEN, Family
from tests.families.texts import TEXTS

ENCODER = {"num_hidden_layers": 3, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 514}
BERT = ENCODER | {"type_vocab_size": 2}
ROBERTA = ENCODER | {"type_vocab_size": 1}
ABSOLUTE = {"position_embedding_type": "absolute"}
OF_NOMIC = {  # as its own code names them
    "activation_function": "swiglu",
    "n_embd": HIDDEN,
    "n_head": 4,
    "n_inner": 2 * HIDDEN,
    "n_layer": 3,
    "layer_norm_epsilon": 1e-12,
    "rotary_emb_scale_base": None,
    "rotary_emb_interleaved": False,
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), False),
}
MODERN = ENCODER | {
    "max_position_embeddings": 2048,
    "cls_token_id": 0,
    "sep_token_id": 1,
    "local_attention": 64,
}
ONE_CLASS = {"num_labels": 1}
POOLING = {"runner": "pooling"}

POOLERS = {
    "bert": Family("Bert", "BertModel", BERT, options=POOLING),  # mxbai, bge-large
    "bert_reranker": Family("Bert", "BertForSequenceClassification", BERT | ONE_CLASS, options=POOLING),
    "bert_tagger": Family("Bert", "BertForTokenClassification", BERT | {"num_labels": 5}, options=POOLING),
    "bge_m3": Family("XLMRoberta", "XLMRobertaModel", ROBERTA, ABSOLUTE, POOLING),
    "bge_reranker": Family("XLMRoberta", "XLMRobertaForSequenceClassification", ROBERTA | ONE_CLASS, ABSOLUTE, POOLING),
    "nomic": Family("NomicBert", "NomicBertModel", BERT | {"max_position_embeddings": 2048}, OF_NOMIC, POOLING),
    "modernbert": Family("ModernBert", "ModernBertModel", MODERN, options=POOLING),
    "modernbert_reranker": Family(
        "ModernBert", "ModernBertForSequenceClassification", MODERN | ONE_CLASS, options=POOLING
    ),
    "qwen3_embedding": Family("Qwen3", "Qwen3ForCausalLM", {"num_hidden_layers": 3}, options=POOLING),
    "qwen3_reranker": Family(
        "Qwen3",
        "Qwen3ForSequenceClassification",
        {"num_hidden_layers": 3, **ONE_CLASS},
        options=POOLING,
    ),
    "roberta": Family("Roberta", "RobertaModel", ROBERTA, ABSOLUTE, POOLING),
    "roberta_reranker": Family("Roberta", "RobertaForSequenceClassification", ROBERTA | ONE_CLASS, ABSOLUTE, POOLING),
    "xlm_roberta_tagger": Family(
        "XLMRoberta", "XLMRobertaForTokenClassification", ROBERTA | {"num_labels": 5}, ABSOLUTE, POOLING
    ),
    "modernbert_tagger": Family(
        "ModernBert", "ModernBertForTokenClassification", MODERN | {"num_labels": 5}, options=POOLING
    ),
    "gpt2_reranker": Family(
        "GPT2", "GPT2ForSequenceClassification", {"num_hidden_layers": 3, **ONE_CLASS}, options=POOLING
    ),
    "jamba_reranker": Family(  # with states
        "Jamba", "JambaForSequenceClassification", {**TEXTS["jamba"].fields, **ONE_CLASS}, options=POOLING
    ),
    "e5_mistral": Family("Mistral", "MistralModel", {"num_hidden_layers": 3}, options=POOLING),
    "gte_qwen2": Family("Qwen2", "Qwen2Model", {"num_hidden_layers": 3}, options=POOLING),
    "qwen3_5_embedding": TEXTS["qwen3_5"]._replace(options=POOLING),
    "granite4_h_embedding": TEXTS["granite4_h"]._replace(options=POOLING),
    "lfm2_embedding": TEXTS["lfm2"]._replace(options=POOLING),
    "embedding_gemma": Family(  # Gemma 3, which reads both ways
        "Gemma3Text",
        "Gemma3TextModel",
        {"num_hidden_layers": 3, "sliding_window": 64, "use_bidirectional_attention": True}
        | {"query_pre_attn_scalar": 32, "hidden_size": HIDDEN},
        options=POOLING,
    ),
}
