"""Fields of config.json that mean the same in all families."""

from __future__ import annotations

from phalanx.spec.families.family import Fixed

FIXED_FIELDS = {
    "is_causal": Fixed(True),
    "is_encoder_decoder": Fixed(False),
    "add_cross_attention": Fixed(False),
    "hidden_act": Fixed("silu"),
    "attention_bias": Fixed(False),
    "mlp_bias": Fixed(False),
    "clip_qkv": Fixed(None),
    "partial_rotary_factor": Fixed(1.0),
    "rope_interleaved": Fixed(False),
    "decoder_sparse_step": Fixed(1),
    "scale_attn_weights": Fixed(True),
    "scale_attn_by_inverse_layer_idx": Fixed(False),
}
"""Fields that no family supports with another value, unless its table says so. Export writes those in the table."""

HARMLESS_FIELDS = frozenset(
    """
    model_type architectures _name_or_path _commit_hash transformers_version torch_dtype dtype
    bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    use_cache return_dict return_dict_in_generate output_attentions output_hidden_states output_scores
    output_router_logits torchscript use_bfloat16 tf_legacy_loss attn_implementation _attn_implementation
    _attn_implementation_autoset gradient_checkpointing pretraining_tp reorder_and_upcast_attn
    chunk_size_feed_forward pruned_heads tie_encoder_decoder is_decoder cross_attention_hidden_size
    initializer_range attention_dropout attn_pdrop embd_pdrop resid_pdrop router_jitter_noise
    id2label label2id num_labels problem_type finetuning_task task_specific_params
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    n_ctx n_special predict_special_tokens output_past _num_labels
    max_window_layers max_sequence_length is_llama_config transformers.js_config unsloth_fixed unsloth_version
    """.split()  # noqa: SIM905
)
"""Fields that do not change the logits of these families: names, token ids, sampling, initialization, dropout, and
heads for other tasks."""
