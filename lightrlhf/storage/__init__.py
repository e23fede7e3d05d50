"""Storage: checkpoints, JSON lines, run directories."""
