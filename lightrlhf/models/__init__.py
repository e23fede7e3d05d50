"""Models: roles on one backbone, loading, saving, LoRA, quantisation, sharding, packing."""
