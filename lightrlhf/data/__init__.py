"""Data: batches, tokens, prepared splits."""
