"""Maths: pure functions of tensors and numbers."""
