"""lightrlhf: RLHF algorithms on Lightning Fabric, one readable file each."""

__version__ = "0.1.0"
