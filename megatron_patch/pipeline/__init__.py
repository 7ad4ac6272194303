"""The vocabulary over the stages of Megatron's pipeline."""
