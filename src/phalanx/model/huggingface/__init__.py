"""Hugging Face checkpoints, tensor names and tokenizers."""
