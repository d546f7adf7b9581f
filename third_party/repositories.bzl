"""Everything evenkeel builds against, from Debian's packages.

    load("@evenkeel//third_party:repositories.bzl", "evenkeel_repositories")
    evenkeel_repositories()

What the calling workspace has defined before is left alone: bring your own
Abseil, GoogleTest or CUDA by defining it first, under upstream's name.
"""

load("//third_party/abseil:abseil.bzl", "abseil_repository")
load("//third_party/cuda:cuda.bzl", "cuda_repository")
load("//third_party/debian:system_library.bzl", "system_files", "system_folder", "system_library", "written_repository")
load("//third_party/torch:torch.bzl", "torch_repository")
load("//third_party/rules_cc:rules_cc.bzl", "RULES_CC_FILES")

def _maybe(rule, name, **kwargs):
    if not native.existing_rule(name):
        rule(name = name, **kwargs)

def _bazel_has_its_own_rules():
    # Debian's build of 4.2.3 calls itself no_version.
    major = (native.bazel_version or "").partition(".")[0]
    return major.isdigit() and int(major) >= 5

def _rules():
    """Defines the repositories that Bazel 4 would fetch, from Debian's files on disk."""
    _maybe(written_repository, name = "rules_cc", files = RULES_CC_FILES)
    _maybe(
        written_repository,
        name = "remote_coverage_tools",
        files = {"BUILD": """\
filegroup(
    name = "coverage_report_generator",
    visibility = ["//visibility:public"],
)
"""},
    )
    for name, path, package in [
        ("bazel_skylib", "/usr/share/bazel/tools/skylib", "bazel-skylib"),
        ("platforms", "/usr/share/bazel/tools/platforms", "bazel-platforms"),
        ("rules_java", "/usr/share/bazel/rules/java", "bazel-rules-java"),
        ("rules_proto", "/usr/share/bazel/rules/proto", "bazel-rules-proto"),
    ]:
        _maybe(system_folder, name = name, path = path, package = package)

def evenkeel_repositories():
    """Defines the repositories that the caller has not defined."""
    if not _bazel_has_its_own_rules():
        _rules()

    _maybe(abseil_repository, name = "com_google_absl")
    _maybe(cuda_repository, name = "cuda")
    _maybe(torch_repository, name = "torch")
    _maybe(
        system_library,
        name = "com_google_googletest",
        what = "GoogleTest",
        package = "libgtest-dev libgmock-dev",
        header = "/usr/include/gmock/gmock.h",
        libraries = {
            "gtest": ["libgmock.a", "libgtest.a"],
            "gtest_main": ["libgmock_main.a"],
        },
        library_deps = {"gtest_main": ["gtest"]},
    )
    _maybe(
        system_library,
        name = "com_github_gflags_gflags",
        what = "gflags",
        package = "libgflags-dev",
        header = "/usr/include/gflags/gflags.h",
        libraries = {"gflags": ["libgflags.a"]},
    )
    _maybe(
        system_library,
        name = "com_github_google_benchmark",
        what = "Google Benchmark",
        package = "libbenchmark-dev",
        header = "/usr/include/benchmark/benchmark.h",
        libraries = {
            "benchmark": ["libbenchmark.so"],
            "benchmark_main": ["libbenchmark_main.a"],
        },
        library_deps = {"benchmark_main": ["benchmark"]},
    )
    _maybe(
        system_library,
        name = "gloo",
        what = "Gloo",
        package = "libgloo-dev",
        header = "/usr/include/gloo/context.h",
        libraries = {"gloo": ["libgloo.so"]},
    )
    _maybe(
        system_library,
        name = "onednn",
        what = "oneDNN",
        package = "libdnnl-dev",
        header = "/usr/include/dnnl.hpp",
        libraries = {"dnnl": ["libdnnl.so"]},
    )
    _maybe(
        system_library,
        name = "zlib",
        what = "zlib",
        package = "zlib1g-dev",
        header = "/usr/include/zlib.h",
        libraries = {"zlib": ["libz.so"]},
    )
    _maybe(
        system_library,
        name = "libdeflate",
        what = "libdeflate",
        package = "libdeflate-dev",
        header = "/usr/include/libdeflate.h",
        libraries = {"libdeflate": ["libdeflate.a"]},
    )
    _maybe(
        system_library,
        name = "microhttpd",
        what = "GNU libmicrohttpd",
        package = "libmicrohttpd-dev",
        header = "/usr/include/microhttpd.h",
        libraries = {"microhttpd": ["libmicrohttpd.so"]},
    )
    _maybe(
        system_library,
        name = "openssl",
        what = "OpenSSL",
        package = "libssl-dev",
        header = "/usr/include/openssl/evp.h",
        libraries = {"crypto": ["libcrypto.so"]},
    )
    _maybe(
        system_library,
        name = "nlohmann_json",
        what = "JSON for Modern C++",
        package = "nlohmann-json3-dev",
        header = "/usr/include/nlohmann/json.hpp",
        libraries = {"json": []},
    )
    _maybe(
        system_files,
        name = "dygraphs",
        what = "dygraphs",
        package = "libjs-dygraphs",
        files = {
            "dygraph.css": "/usr/share/javascript/dygraphs/dygraph.min.css",
            "dygraph.js": "/usr/share/javascript/dygraphs/dygraph.min.js",
            "dygraph_license": "/usr/share/doc/libjs-dygraphs/copyright",
        },
    )
