"""The main job, `cce-dist train`: text, tokenizer, model, loop, checkpoints, report.

Read `loop.py` first. The job uses the public names of `cce_dist`, and its adapters for pipelines.
"""
