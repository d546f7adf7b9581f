"""The files installed for builds without Bazel, as one rule.

    installed_libraries(
        name = "libraries",
        parts = ["join", "comm"],  # folders; each needs only those after it
        programs = ["//tools:launch"],
        deps = ["//join", "//comm:factory"],
    )

It puts the objects of these targets and of what they need into one archive per
part (libevenkeel_comm.a), position-independent ones, and writes
libraries.json: archives, headers, and what else a program has to be linked
with. Abseil stays the system's: its archives are named there, not copied.
CUDA's runtime, where the build has it, is the last part, "cudart": programs are
linked with it also on machines without a toolkit.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

def _part(label):
    """The top folder of a target: comm, join, ..."""
    return label.package.partition("/")[0]

def _abseil_name(label, archive):
    """status of libabsl_status.a."""
    name = archive.basename
    if not name.startswith("libabsl_") or not name.endswith(".a"):
        fail(("{} of {} is not an archive of a system's Abseil; an installation needs libraries that its users " +
              "have as well").format(name, label))
    return name[len("libabsl_"):-len(".a")]

def _link_inputs(deps, parts):
    """Objects by part, names of Abseil's archives, flags, and archives by part that others have made."""
    objects = {part: [] for part in parts}
    abseil = []
    foreign = {}
    flags = []
    inputs = depset(
        transitive = [dep[CcInfo].linking_context.linker_inputs for dep in deps],
        order = "topological",
    )
    for linker_input in inputs.to_list():
        for library in linker_input.libraries:
            if linker_input.owner.workspace_name:
                archive = library.pic_static_library or library.static_library
                if linker_input.owner.workspace_name == "cuda":
                    foreign[linker_input.owner.name] = archive
                    continue
                abseil.append(_abseil_name(linker_input.owner, archive))
            elif _part(linker_input.owner) in objects:
                objects[_part(linker_input.owner)] += library.pic_objects or library.objects
            else:
                fail("{} is needed, and in none of the parts {}".format(linker_input.owner, parts))
        for flag in linker_input.user_link_flags:
            if not flag.startswith("-l") and not flag.startswith("-L") and not flag.startswith("-Wl,"):
                if flag != "-pthread":  # Every program has it.
                    fail("{} links with {}, which is no option of the linker's".format(linker_input.owner, flag))
            elif "rpath" in flag:
                fail("{} links with {}: programs choose their libraries themselves".format(linker_input.owner, flag))
            elif flag not in flags:
                flags.append(flag)
    return objects, abseil, flags, foreign

def _archive(ctx, part, objects):
    toolchain = find_cpp_toolchain(ctx)
    archive = ctx.actions.declare_file("libevenkeel_{}.a".format(part))
    arguments = ctx.actions.args()
    arguments.add("qcsD")  # Appends, also where two objects have one name; the same bytes for the same objects.
    arguments.add(archive)
    arguments.add_all(objects)
    ctx.actions.run(
        executable = toolchain.ar_executable,
        arguments = [arguments],
        inputs = depset(objects, transitive = [toolchain.all_files]),
        outputs = [archive],
        mnemonic = "Archive",
        progress_message = "Archiving %s" % archive.basename,
    )
    return archive

_VIRTUAL = "/_virtual_includes/"

def _include(header):
    """evenkeel/comm/types.h of bazel-out/.../_virtual_includes/types/evenkeel/comm/types.h, else None."""
    rest = header.path.partition(_VIRTUAL)[2]
    return rest.partition("/")[2] if rest else None

def _headers(deps):
    """Include path to file, of all that the targets may include."""
    headers = depset(transitive = [dep[CcInfo].compilation_context.headers for dep in deps])
    return {_include(header): header for header in headers.to_list() if _include(header)}

def _public(deps):
    """The include paths of the targets' own headers, but for those in a folder named internal."""
    own = [header for dep in deps for header in dep[CcInfo].compilation_context.direct_public_headers]
    paths = [_include(header) for header in own if _include(header)]
    return {path: True for path in paths if "/internal/" not in path}

def _installed_libraries_impl(ctx):
    objects, abseil, flags, foreign = _link_inputs(ctx.attr.deps, ctx.attr.parts)
    archives = {part: _archive(ctx, part, files) for part, files in objects.items()}
    archives.update(foreign)
    headers = _headers(ctx.attr.deps)
    description = struct(
        archives = [struct(part = part, file = file.short_path) for part, file in archives.items()],
        headers = [struct(include = include, file = file.short_path) for include, file in headers.items()],
        public_headers = _public(ctx.attr.deps).keys(),
        programs = [program.short_path for program in ctx.files.programs],
        abseil = abseil,
        link_flags = flags,
    )
    json = ctx.actions.declare_file(ctx.label.name + ".json")
    ctx.actions.write(json, description.to_json())
    files = depset([json] + archives.values())
    return [DefaultInfo(
        files = files,
        runfiles = ctx.runfiles(files = headers.values() + ctx.files.programs, transitive_files = files),
    )]

installed_libraries = rule(
    implementation = _installed_libraries_impl,
    attrs = {
        "parts": attr.string_list(
            mandatory = True,
            doc = "The folders of which there is an archive each; one needs only those after it.",
        ),
        "deps": attr.label_list(
            mandatory = True,
            providers = [CcInfo],
            doc = "The targets whose headers users include.",
        ),
        "programs": attr.label_list(doc = "The programs to install, each a single file."),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
