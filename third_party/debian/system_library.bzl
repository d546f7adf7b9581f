"""Repository rules for what a Debian package installs.

Headers are not listed: they lie where the compiler looks by itself, and naming
/usr/include as a system directory would break `#include_next` in the standard
library.
"""

load(":missing.bzl", "missing_head", "missing_sentence", "missing_target")

def library_folders(repository_ctx):
    """The folders that may hold system libraries and exist here."""
    arch = repository_ctx.execute(["uname", "-m"]).stdout.strip()
    folders = [
        "/usr/lib/{}-linux-gnu".format(arch),
        "/usr/lib64",
        "/usr/lib",
    ]
    return [f for f in folders if repository_ctx.path(f).exists]

def find_library(repository_ctx, file):
    """The path of a library file, or None."""
    for folder in library_folders(repository_ctx):
        path = repository_ctx.path(folder + "/" + file)
        if path.exists:
            return path
    return None

def _target(name, srcs, linkopts, deps):
    return """
cc_library(
    name = "{}",
    srcs = {},
    linkopts = {},
    deps = {},
)
""".format(name, srcs, linkopts, deps)

def _system_library_impl(repository_ctx):
    attr = repository_ctx.attr
    found = repository_ctx.path(attr.header).exists
    files = {}
    for entry in attr.libraries.values():
        for file in entry:
            path = find_library(repository_ctx, file)
            files[file] = path
            found = found and path != None

    if not found:
        text = missing_head(missing_sentence(attr.what, attr.package))
        for name in attr.libraries:
            text += missing_target(name)
        repository_ctx.file("BUILD", text)
        return

    text = "package(default_visibility = [\"//visibility:public\"])\n"
    for name, entry in attr.libraries.items():
        srcs = []
        linkopts = ["-pthread"]
        for file in entry:
            if file.endswith(".a"):
                repository_ctx.symlink(files[file], file)
                srcs.append(file)
            else:
                linkopts.append("-l:" + file)
        deps = [":" + dep for dep in attr.library_deps.get(name, [])]
        text += _target(name, srcs, linkopts, deps)
    repository_ctx.file("BUILD", text)

system_library = repository_rule(
    implementation = _system_library_impl,
    local = True,
    configure = True,
    attrs = {
        "what": attr.string(mandatory = True, doc = "Its name in a sentence."),
        "package": attr.string(mandatory = True, doc = "The Debian package."),
        "header": attr.string(mandatory = True, doc = "Exists if installed."),
        "libraries": attr.string_list_dict(
            mandatory = True,
            doc = "Target name to library files; an archive is linked in, a shared library stays one.",
        ),
        "library_deps": attr.string_list_dict(
            doc = "Target name to the targets of this repository it needs.",
        ),
    },
)

def _system_files_impl(repository_ctx):
    attr = repository_ctx.attr
    if not all([repository_ctx.path(path).exists for path in attr.files.values()]):
        text = missing_head(missing_sentence(attr.what, attr.package))
        for name in attr.files:
            text += 'alias(name = "{}", actual = "missing")\n'.format(name)
        repository_ctx.file("BUILD", text)
        return
    for name, path in attr.files.items():
        repository_ctx.symlink(path, name)
    repository_ctx.file("BUILD", "exports_files({})\n".format(attr.files.keys()))

system_files = repository_rule(
    implementation = _system_files_impl,
    local = True,
    configure = True,
    attrs = {
        "what": attr.string(mandatory = True, doc = "Its name in a sentence."),
        "package": attr.string(mandatory = True, doc = "The Debian package."),
        "files": attr.string_dict(mandatory = True, doc = "Target name to the path of the file."),
    },
)

def _system_folder_impl(repository_ctx):
    folder = repository_ctx.path(repository_ctx.attr.path)
    if not folder.exists:
        fail(missing_sentence(repository_ctx.attr.path, repository_ctx.attr.package))
    for entry in folder.readdir():
        repository_ctx.symlink(entry, entry.basename)

system_folder = repository_rule(
    implementation = _system_folder_impl,
    local = True,
    attrs = {
        "path": attr.string(mandatory = True, doc = "The folder with its own BUILD files."),
        "package": attr.string(mandatory = True, doc = "The Debian package."),
    },
)

def _written_repository_impl(repository_ctx):
    for path, text in repository_ctx.attr.files.items():
        repository_ctx.file(path, text)

written_repository = repository_rule(
    implementation = _written_repository_impl,
    doc = "A repository whose few files are given as text.",
    attrs = {"files": attr.string_dict(mandatory = True)},
)
