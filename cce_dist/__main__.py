"""`python -m cce_dist`, for torchrun: torchrun -m cce_dist train CONFIG."""

from .cli import app

if __name__ == "__main__":
    app(prog_name="cce-dist")
