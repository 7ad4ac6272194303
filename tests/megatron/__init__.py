"""Tests of megatron_patch."""
