"""No function takes keywords that its signature does not name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("cce_dist", "megatron_patch")
    for path in (ROOT / package).rglob("*.py")
)

# These stand in for functions of another library, whose keywords they pass on or refuse.
IN_PLACE_OF_OTHERS = {
    "cce_dist/adapters/pipelining.py": {"__call__", "run"},
    "cce_dist/adapters/planned.py": {"__init__", "step", "_step_microbatches", "_post"},
    "cce_dist/bench/kept.py": {"marks_of"},
    "cce_dist/bench/megatron_model.py": {"__init__", "forward"},
    "cce_dist/bench/pipeline_spans.py": {"timed_run", "waiting_run"},
    "cce_dist/testing/faults.py": {"skipping"},
    "cce_dist/testing/interpreter.py": {"launch_quietly", "call"},
    "cce_dist/testing/interpreter_blocks.py": {"dot", "to"},
    "cce_dist/testing/interpreter_memory.py": {
        "create_masked_load",
        "create_masked_store",
        "descriptor_load",
        "load",
        "store",
    },
    "cce_dist/testing/interpreter_ops.py": {"choose"},
    "megatron_patch/deferred.py": {"max", "argmax"},
    "megatron_patch/over_pipeline.py": {"schedule", "init"},
    "megatron_patch/quantized.py": {"schedule"},
    "megatron_patch/replaced.py": {"_defer", "_head_call"},
    "megatron_patch/rows.py": {"sharded_state_dict"},
    "megatron_patch/seams.py": {"backward_step"},
    "megatron_patch/tied.py": {"__call__"},
}
# These pass keywords on to functions of ours, and are still to name them.
KNOWN = {
    "cce_dist/adapters/last_stage.py": {"__init__"},
    "cce_dist/bench/candidates.py": {"_build_apple", "candidate"},
    "cce_dist/bench/methods.py": {"compiled"},
    "cce_dist/bench/rank_methods.py": {"ours"},
    "cce_dist/bench/screen.py": {"_ours"},
    "cce_dist/compiled.py": {"_bind"},
    "cce_dist/compute.py": {"compute"},
    "cce_dist/loss.py": {"_compute_local"},
    "cce_dist/planner/measured.py": {"predict_file"},
    "cce_dist/testing/agents.py": {"elastic_job"},
    "cce_dist/testing/cases.py": {"reference"},
    "megatron_patch/options.py": {"from_environment"},
    "megatron_patch/patch.py": {"apply", "patched"},
}


def takes_any_keyword(source: str) -> set[str]:
    """Names of functions with a parameter `**name: Any`."""
    return {
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.args.kwarg is not None and node.args.kwarg.annotation is not None
        if ast.unparse(node.args.kwarg.annotation) in ("Any", "typing.Any")
    }


@pytest.mark.parametrize("path", FILES, ids=str)
def test_functions_name_their_keywords(path: str) -> None:
    allowed = IN_PLACE_OF_OTHERS.get(path, set()) | KNOWN.get(path, set())
    assert takes_any_keyword((ROOT / path).read_text(encoding="utf-8")) == allowed


def test_exceptions_are_of_files_that_exist() -> None:
    assert set(IN_PLACE_OF_OTHERS) | set(KNOWN) <= set(FILES)
