"""The commands by which Bazel compiles and links, without running them."""

import json
import os
import pathlib
import shlex
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent


def actions_of(query, *options):
    """Returns the actions that `bazel aquery` finds, each a dictionary with "label", "mnemonic" and "arguments"."""
    bazel = shlex.split(os.environ.get("BAZEL", "./bazelw"))
    output = subprocess.run(
        [*bazel, "aquery", "--noshow_progress", "--output=jsonproto", "--noinclude_artifacts", *options, query],
        cwd=ROOT, check=True, stdout=subprocess.PIPE,
    ).stdout
    graph = json.loads(output)
    labels = {target["id"]: target["label"] for target in graph["targets"]}
    return [{**action, "label": labels[action["targetId"]]} for action in graph["actions"]]


def argument_after(arguments, option):
    """Returns the argument that follows an option, such as the source after "-c"."""
    return arguments[arguments.index(option) + 1]
