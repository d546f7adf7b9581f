"""Abseil as Debian's libabsl-dev installs it, under the labels upstream uses.

Which archive needs which others is read from the package's pkg-config files, so
that a program links what it uses and nothing more.
"""

load("//third_party/debian:missing.bzl", "missing_head", "missing_sentence", "missing_target")
load("//third_party/debian:system_library.bzl", "library_folders")

# Label (without //absl/) to pkg-config name (without absl_), where it is not
# simply the target's name.
_OTHER_NAMES = {
    "algorithm:algorithm": "algorithm",
    "algorithm:container": "algorithm_container",
    "random:random": "random_random",
    "random:distributions": "random_distributions",
    "random:bit_gen_ref": "random_bit_gen_ref",
    "random:seed_gen_exception": "random_seed_gen_exception",
    "random:seed_sequences": "random_seed_sequences",
    "flags:flag": "flags",
    "flags:parse": "flags_parse",
    "flags:usage": "flags_usage",
    "flags:reflection": "flags_reflection",
    "container:btree": "btree",
}

_SAME_NAMES = {
    "algorithm": [],
    "base": ["base", "config", "core_headers", "dynamic_annotations", "endian", "log_severity", "prefetch"],
    "cleanup": ["cleanup"],
    "container": ["fixed_array", "flat_hash_map", "flat_hash_set", "inlined_vector", "node_hash_map", "node_hash_set"],
    "debugging": ["failure_signal_handler", "leak_check", "stacktrace", "symbolize"],
    "flags": [],
    "functional": ["any_invocable", "bind_front", "function_ref"],
    "hash": ["hash"],
    "memory": ["memory"],
    "meta": ["type_traits"],
    "numeric": ["bits", "int128"],
    "random": [],
    "status": ["status", "statusor"],
    "strings": ["cord", "str_format", "strings"],
    "synchronization": ["synchronization"],
    "time": ["time"],
    "types": ["any", "compare", "optional", "span", "variant"],
    "utility": ["utility"],
}

def _labels():
    """Folder to {target: pkg-config name}."""
    folders = {}
    for folder, names in _SAME_NAMES.items():
        folders[folder] = {name: "absl_" + name for name in names}
    for label, name in _OTHER_NAMES.items():
        folder, _, target = label.partition(":")
        folders[folder][target] = "absl_" + name
    return folders

def _pkg_config(repository_ctx, path):
    """(required packages, linker flags, own library name or None) of a .pc file."""
    requires = []
    flags = []
    library = None
    for line in repository_ctx.read(path).splitlines():
        if line.startswith("Requires:"):
            for part in line[len("Requires:"):].split(","):
                words = part.strip().split(" ")
                if words[0]:
                    requires.append(words[0])
        elif line.startswith("Libs:"):
            for word in line[len("Libs:"):].split(" "):
                if word.startswith("-labsl_"):
                    library = "lib" + word[2:]
                elif word.startswith("-l") or word.startswith("-Wl,"):
                    flags.append(word)
    return requires, flags, library

def _inline_namespace(repository_ctx):
    """The namespace inside absl that carries the version, mangled."""
    for line in repository_ctx.read("/usr/include/absl/base/options.h").splitlines():
        if line.startswith("#define ABSL_OPTION_INLINE_NAMESPACE_NAME"):
            name = line.split(" ")[-1]
            return str(len(name)) + name
    return ""

def _wrap_options(text, namespace):
    """The linker options that redirect what mutex_tsan.cc wraps."""
    options = []
    for part in text.split("EK_WRAP")[1:]:
        symbol = part.split("\"")[1]
        if symbol[0].isdigit():
            kind = "_ZNK4absl" if part.startswith("_CONST") else "_ZN4absl"
            options.append("-Wl,--wrap=" + kind + namespace + symbol)
    return options

def _synchronization(repository_ctx):
    """absl_synchronization, in view of ThreadSanitizer where that is asked for."""
    source = Label("//third_party/abseil:mutex_tsan.cc")
    repository_ctx.symlink(source, "mutex_tsan.cc")
    namespace = _inline_namespace(repository_ctx)
    return """
config_setting(
    name = "tsan",
    define_values = {{"sanitizer": "thread"}},
)

cc_library(
    name = "mutex_tsan",
    srcs = ["mutex_tsan.cc"],
    copts = ["-std=c++20"],
    linkopts = {options},
    local_defines = ["EK_ABSL={namespace}"],
    deps = [":absl_synchronization_archive"],
    alwayslink = True,
)

cc_library(
    name = "absl_synchronization",
    deps = [":absl_synchronization_archive"] + select({{
        ":tsan": [":mutex_tsan"],
        "//conditions:default": [],
    }}),
)
""".format(
        namespace = namespace,
        options = _wrap_options(repository_ctx.read(source), namespace),
    )

def _abseil_impl(repository_ctx):
    folder = None
    for candidate in library_folders(repository_ctx):
        if repository_ctx.path(candidate + "/pkgconfig/absl_base.pc").exists:
            folder = candidate
            break

    if not folder:
        repository_ctx.file("BUILD", missing_head(missing_sentence("Abseil", "libabsl-dev")))
        for name, targets in _labels().items():
            text = "package(default_visibility = [\"//visibility:public\"])\n"
            for target in targets:
                text += missing_target(target, repository = "@" + repository_ctx.name)
            repository_ctx.file("absl/{}/BUILD".format(name), text)
        return

    text = "package(default_visibility = [\"//visibility:public\"])\n"
    known = {}
    for path in repository_ctx.path(folder + "/pkgconfig").readdir():
        if not path.basename.startswith("absl_"):
            continue
        name = path.basename[:-len(".pc")]
        known[name] = True
        requires, flags, library = _pkg_config(repository_ctx, path)
        srcs = []
        if library:
            archive = library + ".a"
            if repository_ctx.path(folder + "/" + archive).exists:
                repository_ctx.symlink(folder + "/" + archive, archive)
                srcs = [archive]
            else:
                flags.append("-l:" + library + ".so")
        if name == "absl_synchronization":
            text += _synchronization(repository_ctx)
            name = "absl_synchronization_archive"
        text += """
cc_library(
    name = "{}",
    srcs = {},
    linkopts = {},
    deps = {},
)
""".format(name, srcs, flags + ["-pthread"], [":" + r for r in requires])
    repository_ctx.file("BUILD", text)

    for name, targets in _labels().items():
        text = "package(default_visibility = [\"//visibility:public\"])\n"
        for target, package in targets.items():
            if package in known:
                text += "\nalias(\n    name = \"{}\",\n    actual = \"//:{}\",\n)\n".format(target, package)
        repository_ctx.file("absl/{}/BUILD".format(name), text)

abseil_repository = repository_rule(
    implementation = _abseil_impl,
    local = True,
    configure = True,
)
