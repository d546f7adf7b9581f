"""A shared library with our libraries inside, which exports few names.

cc_binary(linkshared = True) would link Abseil's archives, which Debian builds without
-fPIC; so here its shared libraries are linked, and everything else from archives.
"""

_ACTION = "c++-link-dynamic-library"

def _is_abseil(linker_input):
    return linker_input.owner.workspace_name == "com_google_absl"

def _archive_of(library):
    return library.pic_static_library or library.static_library

def _inputs_and_flags(linker_inputs):
    """The files to link, and the flags that name them, in the order of the link."""
    files = []
    flags = []
    for one in linker_inputs:
        for library in one.libraries:
            archive = _archive_of(library)
            if archive and _is_abseil(one):
                flags.append("-l" + archive.basename[len("lib"):-len(".a")])
            elif archive and library.alwayslink:
                files.append(archive)
                flags += ["-Wl,--whole-archive", archive.path, "-Wl,--no-whole-archive"]
            elif archive or library.dynamic_library:
                files.append(archive or library.dynamic_library)
                flags.append(files[-1].path)
        files += one.additional_inputs
        flags += one.user_link_flags
    return files, flags

def _shared_library_impl(ctx):
    toolchain = ctx.attr._toolchain[cc_common.CcToolchainInfo]
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    files, flags = _inputs_and_flags(depset(transitive = [
        dep[CcInfo].linking_context.linker_inputs
        for dep in ctx.attr.deps
    ], order = "topological").to_list())
    out = ctx.actions.declare_file("lib%s.so" % ctx.label.name)
    arguments = cc_common.get_memory_inefficient_command_line(
        feature_configuration = features,
        action_name = _ACTION,
        variables = cc_common.create_link_variables(
            feature_configuration = features,
            cc_toolchain = toolchain,
            is_linking_dynamic_library = True,
            output_file = out.path,
            user_link_flags = [
                "-Wl,--version-script=" + ctx.file.version_script.path,
                "-Wl,-soname,%s.%s" % (out.basename, ctx.attr.abi),
                "-fuse-ld=bfd",  # gold exports parts of std::string, too, against the script.
                "-Wl,--no-undefined",
                "-Wl,--gc-sections",
                "-Wl,--as-needed",
                "-Wl,--start-group",
            ] + flags + ["-Wl,--end-group"] + ctx.fragments.cpp.linkopts,
        ),
    )
    ctx.actions.run(
        executable = cc_common.get_tool_for_action(
            feature_configuration = features,
            action_name = _ACTION,
        ),
        arguments = arguments,
        inputs = depset(files + [ctx.file.version_script], transitive = [toolchain.all_files]),
        outputs = [out],
        mnemonic = "SharedLibrary",
        progress_message = "Linking %s" % out.short_path,
    )
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles([out]))]

shared_library = rule(
    implementation = _shared_library_impl,
    doc = "lib<name>.so, with what `deps` need inside.",
    attrs = {
        "abi": attr.string(
            mandatory = True,
            doc = "Programs look for lib<name>.so.<abi>, so that libraries of two ABIs may be on one system.",
        ),
        "deps": attr.label_list(providers = [CcInfo]),
        "version_script": attr.label(allow_single_file = True, mandatory = True),
        "_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
