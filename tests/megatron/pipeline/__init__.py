"""Tests of megatron_patch over pipeline stages."""
