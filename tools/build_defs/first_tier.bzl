"""The first tier: the tests that `./bazelw test //...` runs. All other tests have the tag "full": only --config=full runs them.

Each test is listed under the promise or the program that it checks. tests/first_tier.sh checks that each promise of
docs/internals.md and each program of the docs is here, and that each of these tests exists. All other tests belong to the
second tier.
"""

# By the number of the promise in docs/internals.md.
PROMISES = {
    "1": [  # Never hangs.
        "//comm/base:clock_test",
        "//comm/control:hub_test",
        "//comm/control:rank_status_test",
        "//comm/control:tree_link_test",
        "//comm:shrink_test",
        "//comm:split_test",
        "//comm:watch_test",
        "//comm:work_test",
        "//join:join_over_shm_test",
        "//tests/conformance:failures_over_shm_test",
        "//tests/conformance:misuse_over_shm_test",
        "//tests/processes:processes_test",
        "//tests/simulation:simulation_of_few_seeds_test",
        "//tests/training:faults_over_shm_test",
        "//tests:faults_over_shm_test",
        "//tests:shm_faults_test",
        "//tests:six_cases_over_shm_test",
    ],
    "2": [  # Equal to one rank; the real program's runs are below, at //trainer:train.
        "//tests/slices:sliced_optimizer_over_shm_test",
        "//tests/uneven:samples_over_shm_test",
        "//tests/uneven:uneven_over_shm_test",
        "//zero_optim:optimizer_over_shm_test",
        "//zero_optim:sharded_balance_over_shm_test",
        "//zero_optim:sharded_freeze_over_shm_test",
        "//zero_optim:sharded_join_over_shm_test",
    ],
    "3": [  # Join adds nothing to the data plane.
        "//join:scope_over_shm_test",
        "//join/steps:step_log_test",
        "//tests/defects:join_planes_over_shm_test",
        "//tests/defects:sharded_join_over_shm_test",
        "//tests/defects:unused_join_over_shm_test",
    ],
    "4": [  # The set of trained parameters is checked.
        "//bucket:data_parallel_over_shm_test",
        "//bucket:trainability_over_shm_test",
        "//bucket:unused_parameters_over_shm_test",
    ],
    "5": [  # Bad input is refused with a sentence.
        "//tests/training:errors_test",
        "//tools:launch_test",
        "//tools:plan_test",
    ],
    "6": [  # Only processes with the job's secret take part.
        "//comm/net:peer_meeting_test",
        "//comm/rendezvous:rendezvous_test",
        "//comm/rendezvous:tcp_store_test",
        "//tests/hostile:hostile_test",
    ],
    "7": [  # The remaining ranks continue after a loss.
        "//join:recovery_plan_test",
        "//tests/recovery:recovery_over_shm_test",
        "//tests/recovery:recovery_uses_over_shm_test",
        "//tests/training:resume_over_shm_test",
        "//tests:elastic_over_shm_test",
        "//zero_optim:damage_over_shm_test",
    ],
    "8": [  # The cost of agreement.
        "//comm:agreement_test",
        "//tests/cost:cost_when_off_test",
    ],
    "9": [  # Omitted or different steps are reported.
        "//bucket:divergence_test",
        "//bucket:replica_check_over_shm_test",
        "//tests/unequal_steps:unequal_steps_over_shm_test",
    ],
    "10": [  # Code of the loop counts on all ranks, or is an error.
        "//tests/programs:program_over_shm_test",
    ],
}

# Keys: a program that the docs name, other than benchmarks, or a package with public headers. Values: tests, or the script
# of a check that is outside //... because it needs PyTorch or Debian packages.
ENTRY_POINTS = {
    "//bucket": [
        "//bucket:readme_test",
        "//bucket:reduction_over_shm_test",
        "//bucket:replace_group_over_shm_test",
        "//bucket:static_graph_over_shm_test",
        "//bucket:stats_over_shm_test",
        "//bucket:tuning_over_shm_test",
        "//tests/defects:ready_order_over_shm_test",
        "//tests/overlap:overlap_over_shm_test",
    ],
    "//comm": [
        "//comm/net:peer_meeting_on_host_test",
        "//comm/shm:shm_test",
        "//comm/tcp:backend_test",
        "//comm/tcp:tcp_test",
        "//comm/tcp:transport_test",
        "//comm/hierarchical:backend_test",
        "//comm:readme_test",
        "//tests/conformance:channels_over_shm_test",
        "//tests/conformance:movement_over_shm_test",
        "//tests/conformance:reductions_over_shm_test",
        "//tests/conformance:tags_over_shm_test",
        "//tests/conformance:uneven_over_shm_test",
        "//tests/mesh:mesh_over_shm_test",
    ],
    "//examples": ["//examples:tutorial_test"],
    "//join": [
        "//join:balance_over_shm_test",
        "//join/steps:straggler_detector_test",
    ],
    "//join/abi:evenkeel": ["python/check.sh"],
    "//libtorch": ["libtorch/check.sh"],
    "//python/evenkeel_c10d:wheel": ["python/check.sh"],
    "//tools:flight": ["//tools:flight_test"],
    "//tools:install": ["//tools:install_test"],
    "//tools:launch": ["//launch:launcher_test"],
    "//tools:package": ["tests/consumer_cmake/check.sh"],
    "//tools:plan": ["//tools:plan_test"],
    "//tools:predict": ["//tools/predict:predict_test"],
    "//tools:samples": ["//trainer/report:sample_account_test"],
    "//tools:top": ["//tests/stragglers:top_test"],
    "//trainer:generate": ["//trainer:generate_test"],
    "//trainer:train": [
        "//tests/training:run_over_shm_test",
        "//trainer/app:training_run_over_shm_test",
        "//trainer/checkpoint:checkpoint_folder_test",
        "//trainer/checkpoint:run_state_test",
        "//trainer/checkpoint:stop_signals_test",
        "//trainer/data:sampler_test",
        "//trainer/report:chrome_trace_test",
        "//trainer:readme_test",
    ],
    "//zero_optim": [
        "//tests/slices:sliced_checkpoint_over_shm_test",
        "//tests/slices:sliced_traffic_test",
        "//tests/sparse:sparse_update_over_shm_test",
        "//zero_optim/checkpoint:checkpoint_test",
        "//zero_optim/checkpoint:checkpoint_writer_test",
        "//zero_optim:clip_over_shm_test",
        "//zero_optim:readme_test",
    ],
}

_TESTS = {
    test: None
    for tests in PROMISES.values() + ENTRY_POINTS.values()
    for test in tests
}

def tier_tags(name):
    """Returns ["full"] for a test of the second tier and [] for one of the first."""
    return [] if "//%s:%s" % (native.package_name(), name) in _TESTS else ["full"]
