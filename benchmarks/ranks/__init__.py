"""Steps of Megatron and of a pipeline on several ranks."""
