"""One suite over all backends: in one process, and `conformance_tests(backend, deps)` per backend that is not."""

load("//tools/build_defs:backend_tests.bzl", "BACKENDS", "backend_tests")
load("//tools/build_defs:cc.bzl", "ek_cc_library", "ek_cc_test", "ek_multirank_test")

_CASES = [
    "any_source",
    "channels",
    "failures",
    "large",
    "misuse",
    "movement",
    "options",
    "reductions",
    "tags",
    "uneven",
]

def conformance_cases(deps):
    """The cases, compiled once for all backends."""
    for case in _CASES:
        ek_cc_library(
            name = case + "_cases",
            testonly = True,
            srcs = [case + ".cc"],
            deps = deps,
            alwayslink = True,
        )

# Where ranks share nothing but the group, so that they may be processes.
PROCESS_CASES = [
    "channels",
    "large",
    "movement",
    "options",
    "reductions",
    "tags",
    "uneven",
]

def conformance_tests_in_process(deps):
    """The suite over each backend of comm/testing/tested_group.h."""
    for case in _CASES:
        ek_multirank_test(
            name = case + "_test",
            srcs = [],
            deps = deps + [":" + case + "_cases"],
        )
        backend_tests(
            case + "_test",
            backends = BACKENDS + ["hierarchical_local", "simulated_nccl"],
        )

def conformance_tests(backend, deps, tags = ["cpu:2", "multirank"], cases = _CASES, size = "medium", **kwargs):
    """The suite, or the given cases of it, over the backend that <backend>.cc names."""
    ek_cc_library(
        name = backend + "_backend",
        testonly = True,
        srcs = [backend + ".cc"],
        deps = deps + [":tested_backend"],
        alwayslink = True,
        **kwargs
    )
    for case in cases:
        ek_cc_test(
            name = backend + "_" + case + "_test",
            size = size,
            srcs = [],
            tags = tags,
            deps = [":" + backend + "_backend", ":" + case + "_cases"],
            **kwargs
        )
