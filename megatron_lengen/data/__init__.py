"""Documents, tokenizers and batches: from text to the rows that a model sees."""
