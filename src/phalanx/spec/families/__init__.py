"""Families of Hugging Face models, one table per family: fields of config.json, fixed values, names of tensors."""
