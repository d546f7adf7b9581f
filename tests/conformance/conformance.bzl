"""One suite over all backends: `conformance_tests(backend, deps)` per backend."""

load("//tools/build_defs:cc.bzl", "ek_cc_library", "ek_cc_test")

_CASES = [
    "channels",
    "failures",
    "large",
    "misuse",
    "movement",
    "options",
    "reductions",
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

def conformance_tests(backend, deps, tags = [], **kwargs):
    """The suite over the backend that <backend>.cc names."""
    ek_cc_library(
        name = backend + "_backend",
        testonly = True,
        srcs = [backend + ".cc"],
        deps = deps + [":tested_backend"],
        alwayslink = True,
        **kwargs
    )
    for case in _CASES:
        ek_cc_test(
            name = backend + "_" + case + "_test",
            srcs = [],
            tags = tags + ["cpu:2", "multirank"],
            deps = [":" + backend + "_backend", ":" + case + "_cases"],
            **kwargs
        )
