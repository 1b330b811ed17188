"""Text to token batches: corpus -> tokenizer -> indexed files -> loader. torch is never imported here."""
