"""Our log-probabilities in frameworks that train with Megatron: verl, SkyRL and NeMo-RL.

    from megatron_patch.frameworks import verl

    verl.apply()

Each module has `apply` and `remove`. docs/guide/frameworks/rl.md.
"""
