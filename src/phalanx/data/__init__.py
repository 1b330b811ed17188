"""Text to token batches: corpus -> tokenizer -> indexed files -> loader. numpy only; torch is never imported here."""
