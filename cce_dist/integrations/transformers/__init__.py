"""The loss of transformers' models without their logits: one line switches it on, one off.

    cce_dist.integrations.transformers.patch(model)     # one model
    cce_dist.integrations.transformers.apply()          # every model that is made from now on
    python -m cce_dist.integrations.transformers script.py ...   # a script that stays as it is

docs/guide/frameworks/transformers.md.
"""

from cce_dist.integrations.errors import PatchError
from cce_dist.integrations.transformers import operators as operators  # registers its handlers
from cce_dist.integrations.transformers.patch import Status, apply, patch, patched, remove, status

__all__ = ["PatchError", "Status", "apply", "patch", "patched", "remove", "status"]
