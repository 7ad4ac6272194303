"""Distillation of a patched model from another one."""
