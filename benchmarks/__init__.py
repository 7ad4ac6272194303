"""Experiments that the project publishes, beside `cce_dist.bench`, and the evidence from them.

This folder is no part of the installed package. In a checkout, `cce-dist bench` has its commands.
"""
