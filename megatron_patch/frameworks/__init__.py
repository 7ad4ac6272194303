"""Our log-probabilities in verl, with Megatron and with FSDP, and in SkyRL and NeMo-RL.

    from megatron_patch.frameworks import verl

    verl.apply()

Each module has `apply` and `remove`. docs/guide/frameworks/rl.md.
"""
