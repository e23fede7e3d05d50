"""Models: roles on one backbone, loading, saving, LoRA, sharding, prefix sharing."""
