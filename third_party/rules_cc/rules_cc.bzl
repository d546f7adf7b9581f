"""A rules_cc for Bazel 4, whose C++ rules are still built in."""

RULES_CC_FILES = {
    "BUILD": "",
    "cc/BUILD": "",
    "cc/defs.bzl": "\n".join([
        "\"\"\"The built-in C++ rules, under the name that newer Bazel gives them.\"\"\"",
    ] + [
        "{0} = native.{0}".format(rule)
        for rule in [
            "cc_binary",
            "cc_import",
            "cc_library",
            "cc_proto_library",
            "cc_test",
            "cc_toolchain",
            "cc_toolchain_suite",
        ]
    ]) + "\n",
}
