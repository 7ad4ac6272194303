"""The four steps over the ranks, and their autograd functions. Read `sharded.py` first."""
