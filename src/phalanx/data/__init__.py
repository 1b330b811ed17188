"""Text to token batches: corpus -> tokenizer -> indexed files -> loader; without torch."""
