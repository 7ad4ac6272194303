"""`VERL_USE_EXTERNAL_MODULES=megatron_patch.frameworks.verl_plugin`: importing this applies ours.

verl imports the modules that this variable names, in every process, and calls nothing in them.
"""

from megatron_patch.frameworks import verl

verl.apply()
