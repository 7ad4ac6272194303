"""The main job, `cce-dist train`: text, tokenizer, model, loop, checkpoints, report.

Read `loop.py` first. Of the library it uses the public names of `cce_dist`, and for pipelines its
adapters.
"""
