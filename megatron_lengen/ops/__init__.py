"""Mathematics on tensors: masks, the dropout family, normalization, attention."""
