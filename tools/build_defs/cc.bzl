"""The C++ rules of this repository.

They carry what a build of our code needs wherever it happens (the language
standard, the include path) and the warnings we look at. That a warning ends the
build is for .bazelrc to say.

A header `comm/status.h` is included as `evenkeel/comm/status.h`, here and in
every workspace that takes evenkeel in.
"""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library", "cc_test")
load(":first_tier.bzl", "tier_tags")
load(":precompiled_header.bzl", "precompiled_header")

_FLAGS = [
    "-std=c++20",
    "-Wall",
    "-Wextra",
    "-Wnon-virtual-dtor",
    "-Woverloaded-virtual",
    "-Wno-missing-field-initializers",  # {.cap = x} means: the rest by default
] + select({
    "//tools/build_defs:clang": [],
    # GCC 12 derives these from inlined code of the standard library and of Abseil, and is wrong about std::string (PR105651,
    # PR105329) and absl::InlinedVector. asan and ubsan look for the same defects in code that runs.
    "//conditions:default": [
        "-Wno-array-bounds",
        "-Wno-restrict",
        "-Wno-stringop-overflow",
        "-Wno-stringop-overread",
    ],
})

_PRELUDE = "//tools/build_defs:evenkeel_prelude"

# Compiling is most of a test's cost, and its own code need not be fast: that of
# the libraries is optimised. A test that computes much says copts = ["-O2"].
_TEST_FLAGS = _FLAGS + ["-O0"]
_TEST_PRELUDE = "//tools/build_defs:test_prelude"

_PROGRAM_DEPS = select({
    "//tools/build_defs:tsan": ["//tools/build_defs:tsan_suppressions"],
    "//conditions:default": [],
})

# From an image, GCC 12 takes the options of functions for another instruction set
# (__attribute__((target))) as well: -O2 for -O3, and contraction where it is off. So
# code with options of its own is compiled without one, but for tests, which have no
# such functions.
def _copts(kwargs, prelude):
    flags = _TEST_FLAGS if prelude == _TEST_PRELUDE else _FLAGS
    own = kwargs.pop("copts", [])
    if not own or prelude == _TEST_PRELUDE:
        flags = flags + ["-include", prelude.rpartition(":")[2] + ".h"]
    return flags + own

def prelude(name, testonly = False, **kwargs):
    """<name>.h: headers that targets include before their first line."""
    precompiled_header(
        name = name,
        testonly = testonly,
        hdr = name + ".h",
        copts = _TEST_FLAGS if testonly else _FLAGS,
        force_pic = select({
            "//tools/build_defs:force_pic": True,
            "//conditions:default": False,
        }),
        visibility = ["//:__subpackages__"],
        **kwargs
    )

def ek_cc_library(name, deps = [], prelude = None, **kwargs):
    """A library; its headers are included as evenkeel/<folder>/<header>.

    One of tests' parts (testonly, with GoogleTest) is compiled as tests are.

    Args:
      name: of the target.
      deps: as of cc_library.
      prelude: the precompiled header to use in place of evenkeel_prelude.
      **kwargs: as of cc_library.
    """
    is_list = type(deps) == type([])  # and not a select()
    if not prelude:
        tests = kwargs.get("testonly") and is_list and "@com_google_googletest//:gtest" in deps
        prelude = _TEST_PRELUDE if tests else _PRELUDE
    cc_library(
        name = name,
        copts = _copts(kwargs, prelude),
        include_prefix = "evenkeel/" + native.package_name(),
        deps = deps + [prelude],
        **kwargs
    )

def ek_cc_binary(name, deps = [], prelude = _PRELUDE, **kwargs):
    """A program; for `prelude` see ek_cc_library."""
    cc_binary(
        name = name,
        copts = _copts(kwargs, prelude),
        deps = deps + [prelude] + _PROGRAM_DEPS,
        **kwargs
    )

def ek_cc_test(name, srcs = None, size = "small", tags = [], deps = [], prelude = _TEST_PRELUDE, **kwargs):
    """A GoogleTest; of the second tier unless first_tier.bzl lists it.

    Args:
      name: x_test.
      srcs: <name>.cc unless it says otherwise.
      size: as of cc_test.
      tags: as of cc_test.
      deps: without GoogleTest and its main(), which come by themselves, and so do the
        parts of Abseil that test_prelude.h includes, if that is the prelude.
      prelude: the precompiled header to use in place of test_prelude.
      **kwargs: as of cc_test.
    """
    cc_test(
        name = name,
        size = size,
        srcs = [name + ".cc"] if srcs == None else srcs,
        copts = _copts(kwargs, prelude),
        linkstatic = kwargs.pop("linkstatic", True),
        tags = tags + tier_tags(name),
        deps = deps + [prelude, "//tools/build_defs:lock_cycles", "@com_google_googletest//:gtest_main"] + _PROGRAM_DEPS,
        **kwargs
    )

def ek_multirank_test(name, size = "medium", tags = [], **kwargs):
    """An ek_cc_test with several ranks: two processors, and the tag "multirank"."""
    ek_cc_test(
        name = name,
        size = size,
        tags = ["cpu:2", "multirank"] + tags,
        **kwargs
    )

def ek_cc_tests(names, **kwargs):
    """An ek_cc_test for each name; `deps` and the rest are those of them all."""
    for name in names:
        ek_cc_test(name = name, **kwargs)

def ek_multirank_tests(names, **kwargs):
    """An ek_multirank_test for each name; `deps` and the rest are those of them all."""
    for name in names:
        ek_multirank_test(name = name, **kwargs)

def ek_cc_benchmark(
        name,
        srcs = None,
        deps = [],
        tags = [],
        size = "small",
        smoke_test_without = None,
        **kwargs):
    """A Google Benchmark program, and a test that runs each case for a moment.

    `bazel run :x_benchmark` measures; `:x_benchmark_smoke_test` keeps it alive. Its
    source is <name>.cc unless `srcs` says otherwise; Google Benchmark comes by itself.
    The smoke test leaves out the cases that match the regular expression
    `smoke_test_without`: sizes and worlds that run no code of their own.
    """
    visibility = kwargs.pop("visibility", None)
    cc_library(
        name = name + "_cases",
        testonly = True,
        srcs = [name + ".cc"] if srcs == None else srcs,
        copts = _copts(kwargs, _PRELUDE),
        tags = tags,
        deps = deps + [_PRELUDE, "@com_github_google_benchmark//:benchmark_main"],
        alwayslink = True,
        **kwargs
    )
    cc_binary(
        name = name,
        testonly = True,
        tags = tags,
        visibility = visibility,
        deps = [":" + name + "_cases"],
    )
    cc_test(
        name = name + "_smoke_test",
        size = size,
        args = ["--benchmark_min_time=0.001"] +
               (["--benchmark_filter=-" + smoke_test_without] if smoke_test_without else []),
        linkstatic = True,
        tags = tags + ["benchmark", "full"],
        deps = [":" + name + "_cases"],
    )
