"""The smoke tests: every Triton kernel, dtype and option of the loss once, in minutes.

tests/conftest.py marks them `smoke`. tests/gpu_runs/test_smoke.py checks what a CPU can: that the
tests exist, and that they name every kernel and option. Which kernels were launched only a run on
a GPU shows: `python -m tests.gpu_runs` names the others.
"""

from __future__ import annotations

# A function's id: parts of its parameters' ids, of which a smoke test has one; (): all its tests.
_TESTS: dict[str, tuple[str, ...]] = {
    # Options and dtypes; float64 by torch.
    "loss/test_loss.py::test_linear_cross_entropy_each_option": ("triton_cuda", "torch_cuda-plain"),
    "loss/test_loss.py::test_linear_cross_entropy_auto_takes_triton_on_a_gpu": (),
    "loss/test_loss.py::test_linear_cross_entropy_is_deterministic": ("triton_cuda",),
    "loss/test_loss_autograd.py::test_linear_cross_entropy_grad_weight_into": ("triton_cuda",),
    "loss/test_loss_traps.py::test_linear_cross_entropy_padded_rows": ("triton_cuda",),
    "backends/triton/test_stats.py::test_triton_refuses_float64_on_a_gpu": (),
    "backends/triton/kernels/test_kernel_numbers.py::test_numbers_are_right_to_the_last_digits": (
        "triton_cuda",
    ),
    "loss/test_invariant.py::test_a_token_has_the_same_bytes_in_every_batch": ("triton_cuda",),
    "loss/test_invariant.py::test_two_gpus_have_the_same_bytes": (),
    # Filters.
    "loss/filter/test_loss_filter.py::test_filtered_each_option_on_a_skewed_head": (
        *("triton_cuda-bias-", "triton_cuda-softcap-", "triton_cuda-everything-"),
        *("triton_cuda-class_weight_smoothing-", "triton_cuda-none-"),
    ),
    "loss/filter/test_loss_filter.py::test_filtered_error_is_bounded_by_the_tail_mass": (
        *("triton_cuda-softcap-large-eps]", "triton_cuda-softcap-zipf-keep_128_no_tail]"),
        *("triton_cuda-plain-gaussian-keep_0.1_drawn]",),
    ),
    "loss/filter/test_loss_entropy.py::test_entropy_comes_nearer_with_the_tail": ("triton_cuda",),
    "loss/filter/test_loss_order.py::test_in_similar_order_sorts_by_key": ("triton_cuda",),
    "backends/triton/test_backward_parts.py::test_hidden_is_done_before_the_rest": (
        *("triton_cuda-filtered_chunks]", "triton_cuda-nothing_kept]", "triton_cuda-keep_logits]"),
    ),
    "backends/triton/test_shares.py::test_shares_of_a_launch_add_up_to_what_it_drops": (),
    # Exact gradients.
    "backends/triton/test_chunks.py::test_chunks_meet_the_promise": (),
    "backends/triton/test_chunks.py::test_late_targets_of_one_id": (),
    "backends/triton/test_chunks.py::test_chunks_of_a_flat_softmax_are_as_close_as_dense_bf16": (
        *("[plain]", "[softcap_smoothing]"),
    ),
    "backends/triton/test_chunks.py::test_scale_multiplies_in_place": (),
    "backends/triton/test_keep_logits.py::test_keep_logits_changes_no_gradient": (),
    # 8 bits.
    "backends/test_screened.py::test_screened_is_closer_than_dense_16_bit": (
        *("triton_cuda", "torch_cuda-bf16-int8", "torch_cuda-fp16-e4m3"),
    ),
    "backends/test_screened.py::test_screened_with_other_options": (
        *("triton_cuda-weights]", "triton_cuda-softcap_scale_bias]", "triton_cuda-no_tail]"),
        *("triton_cuda-in_forward]", "triton_cuda-by_largest_e4m3]"),
    ),
    "backends/test_screened_stats.py::test_statistics_are_as_close_as_dense_16_bit_ones": (
        *("triton_cuda-int8]", "triton_cuda-e4m3]", "triton_cuda-softcap_scale_bias]"),
    ),
    "backends/test_screened.py::test_screened_at_odd_shapes": ("triton_cuda-one_token-e4m3]",),
    "backends/test_screened_weight.py::test_quantized_rows_are_those_of_torch": ("triton_cuda",),
    "backends/triton/test_keep_logits.py::test_screened_keeps_logits": ("triton_cuda-plain]",),
    "loss/test_loss_state.py::test_kept_losses_take_no_memory_of_a_gpu": (
        *("triton_cuda-quantized]", "triton_cuda-quantizer]"),
    ),
    # Hopper's own forward.
    "backends/triton/kernels/test_hopper.py::TestOnHopper::test_gluon_is_there": (),
    "backends/triton/kernels/test_hopper.py::TestOnHopper"
    "::test_hopper_forward_agrees_with_the_portable_one": (
        *("[(256, 5000, 64)-plain-", "[(256, 5000, 64)-softcap-bf16"),
        *("[(256, 5000, 64)-softcap_by_largest-bf16", "[(256, 5000, 64)-exact_softcap-bf16"),
        *("[(256, 5000, 64)-chunks-bf16", "[(256, 5000, 64)-chunks_softcap-fp16"),
        *("[(256, 5000, 64)-screened-bf16", "[(256, 5000, 64)-screened_softcap-fp16"),
        *("[(256, 5000, 64)-screened_large_softcap-bf16", "[(256, 5000, 64)-exact-bf16"),
        *("[(256, 5000, 64)-screened_softcap_e4m3-bf16",),
    ),
    "backends/triton/kernels/test_hopper.py::TestOnHopper"
    "::test_hopper_statistics_agree_with_the_portable_ones": (
        *("[(256, 5000, 64)-plain]", "[(256, 5000, 64)-softcap]"),
        *("[(256, 5000, 64)-screened]", "[(256, 5000, 64)-screened_softcap]"),
    ),
    # Hopper's own backward of every column.
    "backends/triton/kernels/test_hopper.py::TestOnHopper"
    "::test_exact_by_one_launch_agrees_with_a_chunk_at_a_time": (
        *("[(1000, 4997, 200)-plain-bf16", "[(1000, 4997, 200)-everything-bf16"),
        *("[(1000, 4997, 200)-smoothing_of_softcaps-fp16", "[(1000, 4997, 200)-main_grad-bf16"),
    ),
    # Distillation: both forwards of two heads, ranks.
    "distillation/test_by_kernels.py::test_values_and_gradients_are_those_of_dense_logits": (
        *("triton_cuda-bf16-plain-", "triton_cuda-bf16-no cross-entropy-", "triton_cuda-fp32-one"),
    ),
    "distillation/test_by_kernels.py::test_without_biases": ("triton_cuda-bf16-140-",),
    "distillation/test_by_kernels.py::test_filtered_is_no_worse_than_dense_16_bit": (
        "triton_cuda",
    ),
    "distillation/by_kernels/test_ranks.py::test_filtered_over_two_gpus": ("[True-",),
    "distillation/test_screened_teacher.py::test_errors_are_at_most_those_of_dense_bf16": (
        *("triton_cuda-plain", "triton_cuda-softcaps"),
    ),
    "distillation/test_tiles.py::test_values_and_gradients_are_those_of_dense_logits": (
        *("triton_cuda-fp32-all-", "triton_cuda-fp16-all-", "triton_cuda-bf16-all-"),
    ),
    "distillation/test_tiles.py::test_the_merge_of_ranks_is_that_of_eager_torch": (
        *("[forward_kl-True-triton_cuda]", "[jsd-False-triton_cuda]"),
    ),
    "backends/triton/test_stats_numbers.py::test_sums_that_nearly_overflow": (
        *("[triton_cuda-bf16-filtered-2000]", "[triton_cuda-bf16-one pass-17]"),
    ),
    "distillation/listed/test_listed.py::test_values_and_gradients_are_those_of_dense_logits": (
        "triton_cuda-forward_kl-class-1-",
    ),
    # Other entry points, and callers that look at what is launched.
    "frontend/test_logprobs.py::test_token_logprobs_are_those_of_dense_logits": ("triton_cuda",),
    "frontend/test_logprobs.py::test_token_logprobs_policy_gradient": ("triton_cuda",),
    "frontend/test_temperature.py::test_token_logprobs_temperature_of_each_token": ("triton_cuda",),
    "frontend/test_largest.py::test_the_first_largest_logit": ("triton_cuda",),
    "frontend/test_top_k.py::test_the_kernel_orders_as_a_stable_sort": (
        "triton_cuda-5",
        "triton_cuda-20",
    ),
    "frontend/test_support.py::test_they_are_those_of_dense_logits": ("triton_cuda",),
    "frontend/test_top_k.py::test_they_are_torchs": ("triton_cuda",),
    "frontend/compile/test_compile.py::test_compiled_as_eager": (
        *("triton_cuda-plain-", "triton_cuda-in_forward-"),
    ),
    "core/test_tracing.py::test_selective_checkpointing": ("triton_cuda-screened-",),
    "backends/triton/launch/test_replay.py::test_a_played_call_has_the_bits_of_a_prepared_one": (
        *("triton_cuda-filtered]", "triton_cuda-screened]", "triton_cuda-distillation]"),
    ),
    "backends/triton/launch/test_driver.py::test_the_driver_starts_every_kernel": ("[filtered]",),
    "backends/triton/launch/test_devices.py::test_kernels_run_where_the_tensors_are": (
        *("[filtered]", "[tiles]"),
    ),
    "backends/triton/test_triton_gpu.py::test_triton_in_a_cuda_graph": (
        *("[filtered-bf16]", "[exact-fp16]", "[chunks-bf16]"),
    ),
    "backends/triton/test_triton_gpu.py::test_triton_never_waits_for_the_device": (
        *("[stats-weighted]",),
    ),
    "backends/test_pick_tokens.py::test_kernels_pick_what_torch_picks": ("[0.3-",),
    "backends/test_pick_tokens.py::test_a_target_that_is_no_class_ends_the_program": ("[3]",),
    "doctor/test_doctor.py::test_on_a_gpu": (),
    # Ranks: the kernels of one, and on two GPUs what needs a group.
    "backends/test_loss_kernels.py::test_the_loss_and_its_gradient": ("700",),
    "backends/test_merge_kernel.py::test_merged_as_torch_merges": (),
    "backends/test_merge_kernel.py::test_what_a_rank_sends": (),
    "algorithm/test_sharded_nccl.py::test_each_option_over_nccl": (
        *("[filtered-plain-2]", "[exact-softcap-2]", "[in_forward-everything-2]"),
    ),
    "algorithm/test_sharded_nccl.py::test_each_dtype_over_nccl": (
        "[filtered-bf16-sequence_parallel-2]",
    ),
    "algorithm/test_sharded_nccl.py::test_check_ranks_over_nccl": (),
    "pipeline/test_pipelining_nccl.py::test_each_schedule": ("[planned]",),
}
# The kernels, each at one of the functions that launch it.
_LAUNCHES: dict[str, tuple[str, ...]] = {
    "loss/test_loss.py::test_linear_cross_entropy_each_option": (
        *("pack_kernel", "count_kernel", "place_kernel", "forward_kernel", "finish_kernel"),
        *("target_products_kernel", "targets_kernel", "upstream_kernel"),
        *("exact_logits_kernel", "exact_targets_kernel", "exact_products_kernel", "bad_ref_kernel"),
        *("gather_rows_kernel", "store_hidden_kernel"),
    ),
    "backends/test_screened_stats.py::test_statistics_are_as_close_as_dense_16_bit_ones": (
        "screened_stats_kernel",
    ),
    "backends/test_screened.py::test_screened_is_closer_than_dense_16_bit": (
        *("moments_kernel", "vectors_kernel", "sizes_kernel", "shift_kernel", "quantize_kernel"),
        *("sum_parts_kernel", "no_columns_kernel"),
        *("order_kernel", "similar_kernel", "launch_sums_kernel", "factors_kernel"),
        *("marks_kernel", "key_kernel", "sort_kernel"),
        *("tiles_kernel", "running_sums_kernel", "chunks_kernel"),
        *("guard_parts_kernel", "guard_kernel", "exact_columns_kernel", "screened_lse_kernel"),
        *("tail_shares_kernel", "tail_moments_kernel", "tail_error_kernel"),
        *("count_near_threshold_kernel", "pick_near_threshold_kernel"),
        *("near_threshold_logits_kernel", "selection_error_kernel", "filtered_kernel"),
        *("centroid_kernel", "merge_centroids_kernel", "token_sums_kernel", "group_sums_kernel"),
    ),
    "backends/triton/test_backward_parts.py::test_hidden_is_done_before_the_rest": (
        "after_hidden_kernel",
    ),
    "loss/filter/test_loss_entropy.py::test_entropy_comes_nearer_with_the_tail": (
        "entropy_tail_kernel",
    ),
    "backends/triton/test_shares.py::test_shares_of_a_launch_add_up_to_what_it_drops": (
        *("bound_kernel", "lower_kernel"),
    ),
    "backends/test_pick_tokens.py::test_a_target_that_is_no_class_ends_the_program": (
        "require_in_range_kernel",
    ),
    "backends/triton/test_chunks.py::test_late_targets_of_one_id": ("add_pairs_kernel",),
    "backends/triton/test_chunks.py::test_scale_multiplies_in_place": ("scale_kernel",),
    "backends/triton/kernels/test_hopper.py::TestOnHopper"
    "::test_hopper_forward_agrees_with_the_portable_one": (
        *("hopper_forward_kernel", "hopper_logits_kernel"),
    ),
    "backends/triton/kernels/test_hopper.py::TestOnHopper"
    "::test_exact_by_one_launch_agrees_with_a_chunk_at_a_time": ("hopper_exact_kernel",),
    "distillation/test_by_kernels.py::test_filtered_is_no_worse_than_dense_16_bit": (
        *("hopper_teacher_kernel", "divergence_kernel", "jsd_kernel"),
    ),
    "distillation/test_by_kernels.py::test_values_and_gradients_are_those_of_dense_logits": (
        "teacher_forward_kernel",
    ),
    "distillation/test_screened_teacher.py::test_errors_are_at_most_those_of_dense_bf16": (
        *("refuse_kernel", "large_columns_kernel", "large_parts_kernel", "correct_kernel"),
    ),
    "distillation/test_tiles.py::test_values_and_gradients_are_those_of_dense_logits": (
        *("tile_sums_kernel", "tile_terms_kernel", "tile_gradient_kernel"),
    ),
    "distillation/test_tiles.py::test_the_merge_of_ranks_is_that_of_eager_torch": (
        *("merge_sums_kernel", "pack_sums_kernel"),
    ),
    "frontend/test_largest.py::test_the_first_largest_logit": ("merge_extras_kernel",),
    "frontend/test_top_k.py::test_the_kernel_orders_as_a_stable_sort": ("top_kernel",),
    "frontend/test_support.py::test_they_are_those_of_dense_logits": (
        *("pair_logits_kernel", "pair_hidden_kernel", "pair_parts_kernel", "pair_weight_kernel"),
    ),
    "backends/test_loss_kernels.py::test_the_loss_and_its_gradient": (
        *("total_loss_kernel", "share_gradient_kernel"),
    ),
    "backends/test_merge_kernel.py::test_what_a_rank_sends": ("pack_stats_kernel",),
    "backends/test_merge_kernel.py::test_merged_as_torch_merges": ("merge_ranks_kernel",),
}
SMOKE = {f"tests/{function}": parts for function, parts in _TESTS.items()}
LAUNCHES = {f"tests/{function}": kernels for function, kernels in _LAUNCHES.items()}


def is_smoke(test: str) -> bool:
    """Tells whether the GPU test of that id is a smoke test."""
    parts = SMOKE.get(test.partition("[")[0])
    return parts is not None and (not parts or any(part in test for part in parts))
