"""What `./run-tests` leaves to `./run-tests --long`, and which case of the same mechanism stays.

A rule names tests by `file::test[case]`, `*` standing for any text. All of them move, but for those
that `stays` names; where all of a test's cases move, `stays` names another test of the mechanism.
A rule that fits no test, or whose mechanism would be left without a test, ends the collection.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Rule:
    """Tests that take long for what they show besides.

    Attributes:
        moves: Pattern of the tests' ids, from `tests/` on.
        stays: Patterns of those that do not move.
    """

    moves: str
    stays: tuple[str, ...]


def _rules(file: str, *rules: tuple[str, Sequence[str]]) -> list[Rule]:
    """Return rules on the tests of one file; a `stays` that names no file is in it too."""
    return [
        Rule(f"{file}::{moves}", tuple(s if "::" in s else f"{file}::{s}" for s in stays))
        for moves, stays in rules
    ]


RULES: list[Rule] = [
    # -- contract: every strategy and variant with two workers stays -------------------------------
    *_rules(
        "contract/test_strategies.py",
        ("test_trains_exactly_as_one_device_does[*-1-*", ["test_trains_exactly*-1-uneven]"]),
        ("test_trains_exactly_as_one_device_does[*-3-*", ["test_trains_exactly*-3-uneven]"]),
        ("test_float32_stays_within_rounding[*", ["test_float32*-2]"]),
        (
            "test_an_own_loop_trains_as_fit_does[*",
            ["test_an_own_loop*-2-plain]", "test_an_own_loop*mirrored-2-*"],
        ),
        ("test_buffers_end_equal[*-3-*", ["test_buffers_end_equal[*-2-*"]),
        ("test_a_prepared_model_is_still_the_users[*", ["test_a_prepared*-2]"]),
        ("test_stop_ends_all_workers_at_the_agreed_step[*", ["test_stop_ends*-2]"]),
    ),
    *_rules(
        "contract/test_large_models.py",
        ("test_the_host_holds_a_model_of_a_gigabyte_once", ["test_only_rank_0*"]),
        ("test_a_language_model*[compiled-rank 0]", ["test_a_language_model*compiled-function]"]),
        ("test_a_language_model*[adapters*-rank 0]", ["test_a_language_model*adapters*function]"]),
        ("test_a_language_model*[activations*-rank 0]", ["test_a_lang*activations*function]"]),
    ),
    *_rules(
        "contract/test_checkpoints.py",
        ("test_the_same_workers_go_on_bit_for_bit[*-*", ["test_the_same_workers*-]"]),
        ("test_another_number_of_workers*", ["test_another_number*-2-3]"]),
        ("test_an_own_loop_goes_on_where_its_loader_was[12-*", ["test_an_own_loop*[10-*"]),
        ("test_three_workers_go_on_bit_for_bit[*", ["test_three_workers*mirrored*"]),
    ),
    *_rules(
        "contract/test_model_split.py",
        (
            "test_a_model_larger_than_a_workers_memory_trains",
            ["contract/test_layouts.py::test_what_each_worker_holds_is_logged*"],
        ),
        ("test_every_schedule_trains_as_one_device_does[*", ["test_every_schedule*[2-*"]),
        ("test_the_others_bubble_names_the_slow_stage[*", ["test_the_others_bubble*[1f1b]"]),
        ("test_the_bubble_is_near_the_schedules_ideal[*", ["test_the_bubble_is_near*[1f1b-8]"]),
    ),
    *_rules(
        "contract/test_models.py",
        (
            "test_a_model_trains_as_on_one_device[*",
            [
                "test_a_model*[nanogpt-model_split]",
                "test_a_model*[vit-model_split]",
                "test_a_model*[lstm-hybrid]",
                "test_a_model*[encoder-sharded]",
                "test_a_model*[resnet_groupnorm-mirrored]",
            ],
        ),
    ),
    *_rules(
        "contract/test_models_hf.py",
        (
            "test_a_model_trains_as_on_one_device[*",
            ["test_a_model*[hf_gpt2-model_split]", "test_a_model*[hf_bert-model_split]"],
        ),
    ),
    *_rules(
        "contract/test_models_vision.py",
        (
            "test_timms_vision_transformer_trains_as_on_one_device[*",
            ["test_timms_vision*[model_split]"],
        ),
        (
            "test_torchvisions_models_train_as_on_one_device[*",
            ["test_torchvisions*[torchvision_resnet18-model_split]"],
        ),
    ),
    *_rules(
        "contract/test_averaging.py",
        (
            "test_a_compiled_model_is_averaged",
            [
                "contract/test_fit_arguments.py::test_a_compiled_model_trains_as_the_plain_one[eager]"
            ],
        ),
        ("test_through_the_group_messages_give_the_same_sums[*", ["test_through*[ring*"]),
        ("test_a_killed_worker_ends_in_an_error_on_all_others[*", ["test_a_killed*[ring]"]),
        ("test_every_way_of_averaging_is_exact[auto*", ["test_every_way*[ring*"]),
        (
            "test_waits_stay_true[*",
            [
                "test_waits_stay_true[ring-fit]",
                "test_waits_stay_true[hierarchical-prepare]",
                "test_waits_stay_true[topk*-fit]",
            ],
        ),
    ),
    *_rules(
        "contract/test_fit_arguments.py",
        ("test_a_compiled_model_trains_as_the_plain_one[*", ["test_a_compiled*[eager]"]),
    ),
    *_rules(
        "contract/test_layouts.py",
        ("test_four_workers_train_exactly_as_one_device_does[*-SGD]", ["test_four*-AdamW]"]),
        (
            "test_a_slow_worker_anywhere_in_the_grid*",
            ["test_a_slow_worker_anywhere*[3]"],
        ),
        (
            "test_replicas_that_drift_reach_one_devices_loss*",
            ["contract/test_strategies.py::test_trains_exactly*local_sgd-2-*"],
        ),
    ),
    *_rules(
        "contract/test_servers.py",
        ("test_no_worker_ever_sees_half_an_update[*", ["test_no_worker*shared_memory]"]),
        ("test_a_killed_process_ends_in_a_named_error[*", ["test_a_killed*central_storage*"]),
    ),
    *_rules(
        "contract/test_servers_timing.py",
        ("test_bounded_staleness_blocks*[*", ["test_bounded_staleness*[parameter_server-2]"]),
        (
            "test_unbounded_staleness_is_n_minus_1_on_average[*",
            ["test_unbounded_staleness*[parameter_server-2]"],
        ),
    ),
    *_rules(
        "contract/test_tensorflow.py",
        (
            "test_trains_exactly_as_one_device_does[*",
            [
                "test_trains_exactly*[one_device-1-loop]",
                "test_trains_exactly*[mirrored-2-*",
                "test_trains_exactly*[central_storage-2-keras]",
            ],
        ),
        (
            "test_an_optimizer_with_state_is_exact_too[*",
            ["test_an_optimizer*[mirrored-3-fit]"],
        ),
        (
            "test_fit_is_exact_where_shares_are_unequal[*",
            ["test_fit_is_exact*[mirrored-2-*", "test_fit_is_exact*[central_storage-3-{}]"],
        ),
    ),
    *_rules(
        "contract/test_tensorflow_checkpoints.py",
        ("test_dropout_and_an_epochs_metrics_are*", ["test_the_same_replicas*[mirrored-keras]"]),
        ("test_another_number_of_replicas*", ["test_the_same_replicas*[mirrored-keras]"]),
        (
            "test_the_same_replicas_go_on_bit_for_bit[*",
            ["test_the_same*[mirrored-keras]", "test_the_same*[one_device-fit]"],
        ),
    ),
    *_rules(
        "contract/test_tensorflow_keras.py",
        (
            "test_keras_fit_works_unchanged[*",
            [
                "test_keras_fit_works_unchanged[arrays-1]",
                "test_keras_fit_works_unchanged[validation_split-2]",
            ],
        ),
    ),
    *_rules(
        "contract/test_tensorflow_mistakes.py",
        (
            "test_a_mistake_is_named_with_the_next_step[cell*",
            ["test_a_mistake*[cell0-*"],
        ),
        ("test_what_others_raise_is_explained[*", ["test_what_others*[cell0-*"]),
    ),
    *_rules(
        "contract/test_tensorflow_numerics.py",
        (
            "test_a_loop_starts_from_another_runs_weights[*",
            ["contract/test_tensorflow_checkpoints.py::test_the_same_replicas*[one_device-fit]"],
        ),
        ("test_what_xla_compiles*[*", ["test_what_xla_compiles*[mirrored-2]"]),
        (
            "test_more_replicas_than_the_engine_has_devices*",
            ["contract/test_tensorflow_workers.py::test_trains_exactly*[keras-SGD-*"],
        ),
    ),
    *_rules(
        "contract/test_tensorflow_rows.py",
        (
            "test_an_embedding_trains_as_in_plain_keras[*",
            [
                "test_an_embedding*[one_device-1-Adam]",
                "test_an_embedding*[mirrored-2-Adam]",
                "test_an_embedding*[central_storage-3-RMSprop]",
            ],
        ),
    ),
    *_rules(
        "contract/test_tensorflow_split.py",
        ("test_weights_and_their_slots*", ["test_a_slow_stage*[1]"]),
        (
            "test_a_stage_begins_where_the_line_says",
            ["contract/test_tensorflow_split_parity.py::test_trains_exactly*SGD*keras-2]"],
        ),
        ("test_a_slow_stage_is_busy_for_longer*", ["test_a_slow_stage*[1]"]),
    ),
    *_rules(
        "contract/test_tensorflow_split_parity.py",
        (
            "test_trains_exactly_as_one_device_does[*",
            ["test_trains_exactly*SGD*keras-2]", "test_trains_exactly*Adam*fit-2]"],
        ),
    ),
    *_rules(
        "contract/test_across_frameworks.py",
        ("test_from_the_same_weights_both*[dense]", ["test_from_the_same*[convolution]"]),
    ),
    *_rules(
        "contract/test_tensorflow_tpu.py",
        ("test_an_address_that_*", ["test_an_address_where_nobody_listens"]),
    ),
    *_rules(
        "contract/test_tensorflow_workers.py",
        (
            "test_trains_exactly_as_one_device_does[*",
            ["test_trains_exactly*[keras-SGD-*", "test_trains_exactly*[fit-Adam-*"],
        ),
        ("test_keras_fit_works_unchanged[*", ["test_trains_exactly*[keras-SGD-*"]),
        ("test_the_model_is_the_engines_own_afterwards", ["test_trains_exactly*[keras-SGD-*"]),
        (
            "test_a_worker_that_dies_is_noticed_and_the_other_goes_on",
            ["cluster/test_tensorflow_workers.py::test_a_dead_worker_is_named*"],
        ),
    ),
    # -- the timing matrix: one case of each way of measuring --------------------------------------
    *_rules(
        "contract/test_strategies_timing.py",
        (
            "test_records_cover_the_run[*",
            [
                f"test_records_cover*[{case}]"
                for case in (
                    "mirrored-2-fit",
                    "mirrored-2-prepare",
                    "central_storage-2-fit",
                    "sharded-2-fit",
                    "model_split-2-fit",
                )
            ],
        ),
        (
            "test_an_injected_delay_is_read_back_as_the_others_wait[*",
            [
                f"test_an_injected_delay*[{case}]"
                for case in (
                    "mirrored-2-fit-forward",
                    "mirrored-2-prepare-backward",
                    "central_storage-2-fit-data",
                    "sharded-2-fit-forward",
                )
            ],
        ),
        (
            "test_an_injected_delay_is_read_back_as_the_others_bubble[*",
            ["test_an_injected_delay*bubble[model_split-2-forward]"],
        ),
    ),
    *_rules(
        "contract/test_tensorflow_timing.py",
        (
            "test_records_cover_the_run[*",
            ["test_records_cover*[mirrored-2-keras]", "test_records_cover*[mirrored-2-loop]"],
        ),
        (
            "test_an_injected_delay_is_read_back_as_the_others_wait[*",
            [
                "test_an_injected_delay*[mirrored-2-keras]",
                "test_an_injected_delay*[central_storage-3-loop]",
            ],
        ),
    ),
    # -- pictures and logs -------------------------------------------------------------------------
    *_rules(
        "unit/test_comparison_figure.py",
        (
            "test_words_never_overlap_and_stay_on_the_page[*",
            ["test_words_never*[eight]"],
        ),
    ),
    *_rules(
        "unit/test_comparison_figure.py",
        ("test_names_are_drawn_as_they_are_written", ["test_words_never*[eight]"]),
    ),
    *_rules(
        "unit/test_figure.py",
        (
            "test_pictures_grow_with_the_workers*",
            ["test_the_picture_of_a_pipeline_shows_bubbles_and_stages"],
        ),
    ),
    *_rules(
        "unit/test_log_sinks.py",
        (
            "test_a_finished_run_is_whole_in_mlflow",
            ["test_a_finished_run_is_whole_in_tensorboard", "test_runs_that_end_early*[failed-*"],
        ),
        ("test_runs_that_end_early_are_completed_too[*", ["test_runs_that_end_early*[failed-*"]),
    ),
    *_rules(
        "unit/test_culprit.py",
        ("test_without_a_fault_hardly_anybody*", ["test_without_a_fault*-300]"]),
        (
            "test_while_a_run_goes_on_hardly_anybody*",
            ["test_while_a_run*[linear-3]", "test_while_a_run*[pipeline-2]"],
        ),
        ("test_ten_milliseconds_are_put_down*", ["test_ten_milliseconds*-60]"]),
        ("test_delays_of_other_kinds*", ["test_delays_of_other_kinds*[linear-3-*"]),
    ),
    # -- a killed kernel, a cluster that is kept: every way of dying -------------------------------
    *_rules(
        "cluster/test_leftovers.py",
        (
            "test_a_killed_kernel_leaves_nothing[*",
            ["test_a_killed_kernel*[a run]"],
        ),
        (
            "test_neither_does_one_whose_helpers_were_killed_before[*",
            ["test_a_killed_kernel*[a run]"],
        ),
        ("test_a_kernel_that_ends_by_itself_leaves_nothing[*", ["test_a_notebook*[shutdown]"]),
        (
            "test_a_notebook_that_is_closed_or_restarted_leaves_nothing[*",
            ["test_a_notebook*[shutdown]"],
        ),
        (
            "test_engines_that_nobody_forked_miss_their_kernel_themselves",
            ["test_a_killed_kernel*[a run]"],
        ),
        ("test_only_processes_of_the_cluster_are_ended", ["test_a_killed_kernel*[a run]"]),
        (
            "test_a_warm_parent_killed_in_its_kernels_life_leaves_nothing*",
            ["test_a_killed_kernel*[a run]"],
        ),
        (
            "test_a_kernel_killed_in_the_middle_of_starting_leaves_nothing[*",
            ["test_a_killed_kernel*[a run]"],
        ),
    ),
    *_rules(
        "cluster/test_leftovers_tensorflow.py",
        ("test_a_killed_kernel*", ["cluster/test_leftovers.py::test_a_killed_kernel*[a run]"]),
    ),
    *_rules(
        "cluster/test_keep.py",
        (
            "test_the_outcome_of_a_run_that_ended_meanwhile_is_found",
            ["test_a_run_goes_on_without_its_kernel_and_is_restored_whole"],
        ),
        (
            "test_a_failure_meanwhile_is_found_too",
            ["test_a_run_goes_on_without_its_kernel_and_is_restored_whole"],
        ),
        (
            "test_one_owner_at_a_time_and_take_takes_it",
            ["test_a_run_goes_on_without_its_kernel_and_is_restored_whole"],
        ),
    ),
    *_rules(
        "cluster/test_keep_ends.py",
        ("test_*", ["test_a_cluster_that_was_forgotten_ends_itself[True-3s]"]),
    ),
    *_rules(
        "cluster/test_keep_notebook.py",
        ("test_*", ["cluster/test_keep.py::test_a_run_goes_on_without_its_kernel*"]),
    ),
    *_rules(
        "cluster/test_mistakes.py",
        (
            "test_a_mistake_of_the_line_is_named*[A_lambda_as_a_recipe]",
            ["test_a_mistake_of_the_line_is_named*[An_option_is_out_of_range]"],
        ),
    ),
    *_rules(
        "cluster/test_habits.py",
        (
            "test_a_script_for_torchrun_trains_as_under_torchrun[*",
            ["test_a_script_for_torchrun_runs_as_it_is[*"],
        ),
    ),
    *_rules(
        "cluster/test_fail_fast.py",
        ("test_a_call_that_never_returns*", ["test_one_raises_while_the_others_wait*"]),
    ),
    *_rules(
        "cluster/test_keeper.py",
        ("test_two_processes_meet*", ["test_two_processes_meet*[forked]"]),
    ),
    *_rules(
        "cluster/test_magics.py",
        (
            "test_a_cluster_stops_and_another_starts",
            ["test_a_start_leaves_one_output_the_table"],
        ),
        (
            "test_a_start_that_fails_leaves_a_notebook_that_can_try_again",
            ["test_a_start_leaves_one_output_the_table"],
        ),
        (
            "test_an_ordinary_end_of_the_kernel_leaves_no_process",
            ["cluster/test_leftovers.py::test_a_notebook*[shutdown]"],
        ),
        (
            "test_two_clusters_side_by_side_do_not_meet",
            ["cluster/test_leftovers.py::test_a_killed_kernel*[a run]"],
        ),
        (
            "test_without_prewarming_nothing_is_started_until_it_is_asked_for",
            ["test_a_start_leaves_one_output_the_table"],
        ),
    ),
    *_rules(
        "cluster/test_warm.py",
        (
            "test_a_kept_cluster_survives_its_kernel*",
            ["cluster/test_keep.py::test_a_run_goes_on_without_its_kernel*"],
        ),
        ("test_a_reused_pid_is_not_killed", ["test_stop_ends_children_guarded_processes*"]),
        (
            "test_nothing_survives_a_killed_kernel",
            ["cluster/test_leftovers.py::test_a_killed_kernel*[a run]"],
        ),
    ),
    *_rules(
        "cluster/test_deaths.py",
        (
            "test_engines_end_with_their_warm_parent_and_another_forks_the_next",
            ["test_an_end_in_a_cell_is_named*"],
        ),
        (
            "test_without_the_controller_no_engine_can_be_reached*",
            ["test_an_end_in_a_cell_is_named*"],
        ),
        (
            "test_a_kill_while_memory_grows_is_called_a_likely_lack_of_it",
            ["test_a_kill_is_named_within_two_seconds*"],
        ),
    ),
    *_rules(
        "cluster/test_fallback.py",
        (
            "test_a_killed_engine_is_noticed_and_comes_back_under_its_id",
            ["test_cells_and_runs_work_without_a_warm_parent"],
        ),
        ("test_stop_leaves_no_process", ["test_cells_and_runs_work_without_a_warm_parent"]),
    ),
    *_rules(
        "cluster/test_launcher.py",
        (
            "test_plain_ipyparallel_starts_and_stops_engines_by_name",
            ["test_engines_get_the_notebooks_folder_path_and_environment"],
        ),
        (
            "test_another_process_can_take_the_engines_up",
            ["cluster/test_keep.py::test_a_run_goes_on_without_its_kernel*"],
        ),
    ),
    *_rules(
        "cluster/test_control.py",
        ("test_a_run_whose_kernel_was_killed_can_be_read_back", ["test_without_the_control*"]),
    ),
    *_rules(
        "cluster/test_doctor.py",
        ("test_the_whole_gpu_test*", ["test_a_short_gpu_test*"]),
    ),
    *_rules(
        "cluster/test_soak.py",
        (
            "test_nothing_grows_over_mixed_runs_with_faults",
            ["test_engines_hold_nothing_more_after_many_runs_than_after_a_few"],
        ),
        (
            "test_the_kernel_lets_go_of_old_runs_and_they_can_still_be_read",
            ["test_engines_hold_nothing_more_after_many_runs_than_after_a_few"],
        ),
    ),
    *_rules(
        "cluster/test_two_users.py",
        ("test_*", ["cluster/test_listening.py::test_every_strategy_listens*[mirrored]"]),
    ),
    *_rules(
        "cluster/test_log_runs.py",
        (
            "test_a_run_is_written_to_both_while_its_notebook_loads_no_framework",
            ["unit/test_log_sinks.py::test_writing_loads_no_framework"],
        ),
    ),
    *_rules(
        "cluster/test_compare.py",
        ("test_*", ["unit/test_comparison.py::test_*"]),
    ),
    *_rules(
        "cluster/test_recipes.py",
        (
            "test_a_built_in_recipe_trains_under_every_strategy[*",
            ["test_a_built_in*[digits_mlp-mirrored]", "test_a_built_in*[digits_cnn-model_split]"],
        ),
    ),
    *_rules(
        "cluster/test_listening.py",
        (
            "test_every_strategy_listens_on_loopback_alone[*",
            ["test_every*[mirrored]", "test_every*[parameter_server]"],
        ),
    ),
    *_rules(
        "cluster/test_listening_tensorflow.py",
        (
            "test_grpc_is_open_during_the_run_alone*",
            ["cluster/test_listening.py::test_every_strategy_listens*[mirrored]"],
        ),
    ),
    *_rules(
        "cluster/test_hangs.py",
        ("test_a_runs_hang_is_named_in_what_views_draw[*", ["test_a_runs_hang*[mirrored]"]),
    ),
    *_rules(
        "cluster/test_lending.py",
        ("test_engines_that_have_ended_cannot_be_reused", ["test_engines_that_lost*"]),
        ("test_a_cluster_whose_controller_died*", ["test_engines_that_lost*"]),
    ),
    # -- recovery: one way of dying, one strategy of each kind -------------------------------------
    *_rules(
        "cluster/recovery/test_replaced.py",
        (
            "test_the_warm_parents_death_takes_all_engines_and_the_run_goes_on",
            ["test_a_dead_worker_is_replaced_and_nothing_changes[0]"],
        ),
        (
            "test_what_dies_again_and_again_is_given_up_on",
            ["test_a_dead_worker_is_replaced_and_nothing_changes[0]"],
        ),
        (
            "test_a_death_in_an_evaluation",
            ["test_a_death_while_a_checkpoint_is_written"],
        ),
        (
            "test_a_dead_worker_is_replaced_and_nothing_changes[*",
            ["test_a_dead_worker_is_replaced_and_nothing_changes[0]"],
        ),
        (
            "test_a_death_while_the_run_recovers",
            ["test_a_death_while_a_checkpoint_is_written"],
        ),
        ("test_two_deaths_at_once", ["test_a_death_while_a_checkpoint_is_written"]),
        (
            "test_a_function_is_begun_again_with_its_arguments",
            ["test_without_a_checkpoint_yet_the_run_begins_anew"],
        ),
        (
            "test_variables_of_earlier_cells_are_there*",
            ["test_a_dead_worker_is_replaced_and_nothing_changes[0]"],
        ),
    ),
    *_rules(
        "cluster/recovery/test_strategies.py",
        ("test_strategies_go_on*[continue-*", ["test_strategies_go_on*[replace-sharded-*"]),
        (
            "test_strategies_go_on*[replace-*",
            ["test_strategies_go_on*[replace-sharded-*", "test_strategies*[replace-central_*"],
        ),
    ),
    *_rules(
        "cluster/recovery/test_servers_die.py",
        (
            "test_asynchronous_workers_do_without_a_dead_one",
            ["test_a_dead_server_comes_back_with_the_checkpoint[parameter_server]"],
        ),
        (
            "test_who_evaluates_and_saves_cannot_be_done_without",
            ["test_a_dead_server_comes_back_with_the_checkpoint[parameter_server]"],
        ),
        (
            "test_the_last_but_rank_0_may_die_too*",
            ["test_a_dead_server_comes_back_with_the_checkpoint[parameter_server]"],
        ),
        (
            "test_a_dead_server_comes_back_with_the_checkpoint[*",
            ["test_a_dead_server_comes_back_with_the_checkpoint[parameter_server]"],
        ),
    ),
    # -- TensorFlow in engines: imports of half a gigabyte, constructors that wait -----------------
    *_rules(
        "cluster/test_tensorflow_recovery.py",
        (
            "test_*",
            [
                "cluster/recovery/test_replaced.py::test_a_dead_worker_is_replaced*[0]",
                "cluster/test_tensorflow_workers.py::test_a_dead_worker_is_named*",
                "contract/test_tensorflow_checkpoints.py::test_the_same_replicas*[mirrored-keras]",
            ],
        ),
    ),
    *_rules(
        "cluster/test_tensorflow_runs.py",
        (
            "test_wb_fit_trains_a_keras_model_and_its_weights_come_home",
            ["test_plain_keras_trains_on_replicas_of_one_engine"],
        ),
        (
            "test_the_textbook_cell_runs_as_it_stands",
            ["test_plain_keras_trains_on_replicas_of_one_engine"],
        ),
    ),
    *_rules(
        "cluster/test_tensorflow_parameter_server.py",
        (
            "test_workers_take_steps_at_their_own_pace[*",
            ["test_workers_take_steps_at_their_own_pace[keras]"],
        ),
        ("test_a_worker_that_does_not_come_is_named", ["test_a_killed_server_is_named"]),
        (
            "test_a_killed_worker_is_survived_and_said",
            ["test_a_killed_server_is_named"],
        ),
        (
            "test_what_closures_cannot_carry_is_refused[*",
            ["test_what_closures*[on_step_end]"],
        ),
        ("test_pause_and_stop_between_closures[*", ["test_pause_and_stop*[source0]"]),
    ),
    *_rules(
        "cluster/test_tensorflow_workers.py",
        (
            "test_a_worker_that_stalls_is_named_within_the_timeout*",
            ["test_a_dead_worker_is_named*"],
        ),
        (
            "test_pause_and_stop_reach_all_workers_at_one_step[*",
            ["test_pause_and_stop*[wb_fit]"],
        ),
    ),
    *_rules(
        "cluster/test_tensorflow_recipes.py",
        (
            "test_a_built_in_recipe_trains[*",
            ["test_a_built_in*[digits_cnn-mirrored]"],
        ),
        ("test_the_digits_are_learnt", ["test_a_built_in*[digits_cnn-mirrored]"]),
    ),
    *_rules(
        "cluster/test_tensorflow_engines.py",
        (
            "test_a_spent_engine_is_replaced*",
            ["cluster/recovery/test_replaced.py::test_a_dead_worker_is_replaced*[0]"],
        ),
        (
            "test_a_killed_engine_ends_in_a_named_failure*",
            ["cluster/test_tensorflow_runs.py::test_a_killed_replica_is_named*"],
        ),
        (
            "test_neither_parent_outlives_a_killed_kernel",
            ["cluster/test_leftovers.py::test_a_killed_kernel*[a run]"],
        ),
        (
            "test_an_engine_with_variables_imports_beside_them*",
            ["test_an_engine_without_variables_gives_way*"],
        ),
        ("test_cells_name_a_framework_too", ["test_an_engine_without_variables_gives_way*"]),
    ),
    *_rules(
        "cluster/test_tensorflow_checkpoints.py",
        (
            "test_it_goes_on_to_the_same_result[*",
            ["contract/test_tensorflow_checkpoints.py::test_the_same_replicas*[mirrored-keras]"],
        ),
    ),
    *_rules(
        "cluster/test_tensorflow_profile.py",
        ("test_*", ["cluster/test_profile_runs.py::test_*"]),
    ),
    *_rules(
        "cluster/test_tensorflow_mistakes.py",
        (
            "test_a_mistake_is_named_with_the_next_step[*",
            ["contract/test_tensorflow_mistakes.py::test_a_mistake_is_named*[cell0-*"],
        ),
    ),
    # -- in a browser ------------------------------------------------------------------------------
    *_rules(
        "browser/test_real_run.py",
        (
            "test_the_quickstart_runs_to_its_end_with_moving_curves[*",
            [
                "test_stop_in_mid_run_ends_the_cell_and_leaves_the_engines_alive",
                "notebooks/test_quickstart.py::test_every*[00_quickstart]",
            ],
        ),
    ),
    *_rules(
        "browser/test_panel_life.py",
        (
            "test_*",
            ["browser/test_dashboard_live.py::test_a_page_reload_during_a_background_run*"],
        ),
    ),
    *_rules(
        "browser/test_panel_teach.py",
        ("test_one_step_at_a_time*", ["browser/test_panel.py::test_a_hand_that_has_only_keys*"]),
    ),
    *_rules(
        "browser/test_panel_run.py",
        ("test_a_worker_is_slowed*", ["browser/test_panel.py::test_a_hand_that_has_only_keys*"]),
    ),
    *_rules(
        "browser/test_panel.py",
        ("test_two_strategies_are_picked*", ["test_a_hand_that_has_only_keys*"]),
        ("test_a_cluster_is_started_grown*", ["test_a_hand_that_has_only_keys*"]),
    ),
    *_rules(
        "browser/test_panel_compare.py",
        ("test_*", ["browser/test_panel.py::test_a_hand_that_has_only_keys*"]),
    ),
    *_rules(
        "browser/test_panel_many.py",
        ("test_a_click_is_answered_at_once*", ["test_at_every_width*"]),
    ),
    *_rules(
        "browser/test_panel_choose.py",
        ("test_two_strategies_over_three_seeds*", ["test_a_function_brings_its_parameters*"]),
        ("test_a_recipe_that_cannot_be_built*", ["test_a_function_brings_its_parameters*"]),
        (
            "test_what_is_wrong_is_said_where_it_was_typed",
            ["test_a_function_brings_its_parameters*"],
        ),
    ),
    *_rules(
        "browser/test_dashboard_live.py",
        (
            "test_a_page_reloaded_while_the_cell_blocks*",
            ["test_a_page_reload_during_a_background_run*"],
        ),
        (
            "test_eight_workers_fit_without_overflow[*",
            ["browser/test_panel_many.py::test_at_every_width*"],
        ),
        (
            "test_buttons_work_while_the_cell_blocks*",
            ["browser/test_real_run.py::test_stop_in_mid_run*"],
        ),
        ("test_a_pipeline_shows_its_bubbles_and_stages[*", ["test_a_pipeline*[1100]"]),
    ),
    # -- pages, notebooks, labs, grading, the image ------------------------------------------------
    *_rules(
        "docs/test_code_blocks.py",
        (
            "test_a_page_runs_as_it_stands[*",
            [f"test_a_page*[{page}]" for page in ("README.md", "docs/magics.md", "docs/traces.md")],
        ),
    ),
    *_rules(
        "notebooks/test_quickstart.py",
        ("test_every_cell_runs_and_gives_the_stored_output[*", ["test_every*[00_quickstart]"]),
        ("test_the_comparison_can_fail", ["test_every*[00_quickstart]"]),
    ),
    *_rules(
        "labs/test_checks.py",
        (
            "test_a_check_finds_what_is_wrong*",
            [
                "labs/test_bad_input.py::test_an_answer_of_the_wrong_kind*",
                "labs/test_notebooks.py::test_with_its_solutions*lab_1*",
            ],
        ),
    ),
    *_rules(
        "labs/test_notebooks.py",
        ("test_with_its_solutions*", ["test_with_its_solutions*lab_1*"]),
    ),
    *_rules(
        "labs/test_grading.py",
        (
            "test_*",
            ["labs/test_grading_merging.py::test_*", "labs/test_grading_settling.py::test_*"],
        ),
    ),
    *_rules(
        "labs/test_grading_exploits.py",
        ("test_no_lie_is_marked*", ["test_answers_that_say_nothing*"]),
        ("test_solutions_checks*", ["test_a_place_shows_the_system*else]"]),
        ("test_a_place_shows*root*", ["test_a_place_shows*else]"]),
        ("test_whoever_grades*root*", ["test_whoever_grades*else]"]),
        ("test_a_cell_that_kills_engines*", ["labs/test_grading_settling.py::test_a_cell_that_*"]),
    ),
    *_rules(
        "labs/test_grading_command.py",
        ("test_*", ["test_arguments_that_make_no_sense_are_status_2*", "test_what_was_graded*"]),
    ),
    *_rules(
        "cluster/test_figure_interrupted.py",
        (
            "test_an_interrupted_first_figure_leaves_matplotlib_whole[*",
            ["test_an_interrupted_first_figure*[matplotlib.font_manager]"],
        ),
    ),
    *_rules(
        "cluster/test_full_places.py",
        ("test_*", ["unit/test_full_places.py::test_workers_without_room*"]),
    ),
    *_rules("binder/test_image.py", ("test_*", ["binder/test_recipe.py::test_*"])),
    *_rules(
        "benchmarks/test_short.py",
        ("test_a_benchmark_on_workers_runs[*", ["test_a_cheap_benchmark_runs[*"]),
        ("test_a_benchmark_on_engines_runs[*", ["test_a_cheap_benchmark_runs[*"]),
        ("test_a_benchmark_of_tensorflow_runs[*", ["test_a_cheap_benchmark_runs[*"]),
    ),
    *_rules(
        "binder/test_drive.py",
        ("test_a_notebook_is_run_through_a_server*", ["test_memory_that_processes_share*"]),
    ),
]


def mark(items: Iterable[pytest.Item], whole: bool) -> None:
    """Mark the tests that rules move as `long`.

    Args:
        whole: Whether all tests of the files are there, so that rules can be checked.

    Raises:
        pytest.UsageError: A rule fits no test of its file, or leaves its mechanism without one.
    """
    by_file: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        by_file.setdefault(name.partition("::")[0], {})[name] = item
    wrong, moved = [], set()
    for rule in RULES:
        stays = [_expression(pattern) for pattern in rule.stays]
        found = _fitting(rule.moves, by_file)
        if not found and _file(rule.moves) in by_file:
            wrong.append(f"{rule.moves} moves, but is no test")
        moved.update(name for name in found if not any(one.fullmatch(name) for one in stays))
    for name in moved:
        by_file[_file(name)][name].add_marker(pytest.mark.long)
    wrong += [
        f"{pattern} stays, but no such test does"
        for rule in RULES
        for pattern in rule.stays
        if _file(pattern) in by_file and not _fitting(pattern, by_file) - moved
    ]
    if wrong and whole:
        raise pytest.UsageError("tests/long_tests.py: " + "; ".join(wrong))


def _fitting(pattern: str, by_file: dict[str, dict[str, pytest.Item]]) -> set[str]:
    expression = _expression(pattern)
    return {name for name in by_file.get(_file(pattern), {}) if expression.fullmatch(name)}


def _file(name: str) -> str:
    return name.partition("::")[0]


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", ".*"), re.DOTALL)
