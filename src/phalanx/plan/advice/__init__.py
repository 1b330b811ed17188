"""Rules of thumb and OOM remedies."""
