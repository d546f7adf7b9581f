"""Stand-ins for a package that is not installed.

A target that needs the package then fails with one sentence, when it is built;
everything else still loads, answers queries and builds.
"""

_HEAD = """\
package(default_visibility = ["//visibility:public"])

genrule(
    name = "missing",
    outs = ["missing.h"],
    cmd = "echo '{sentence}' >&2; exit 1",
    message = "Looking for",
)
"""

_TARGET = """
cc_library(
    name = "{name}",
    hdrs = ["{repository}//:missing.h"],
)
"""

def missing_sentence(what, package):
    # A running Bazel server has looked already.
    return "{} is not installed: apt-get install {} && bazel shutdown".format(what, package)

def missing_head(sentence):
    """The BUILD text that defines the failing header."""
    return _HEAD.format(sentence = sentence)

def missing_target(name, repository = ""):
    """The BUILD text of one library that needs the failing header."""
    return _TARGET.format(name = name, repository = repository)
