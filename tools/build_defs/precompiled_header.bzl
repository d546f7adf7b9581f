"""Headers that GCC reads as its own memory image instead of as text.

Sources include Abseil and the standard library, tests GoogleTest besides, which
takes longer to parse than most sources themselves. A target with this rule among
its `deps` and `-include <hdr>` among its `copts` starts from the image. Beside
the image is an empty header of that name: GCC reads it where it cannot use the
image, which was made with other options, and so do other compilers. So the image
changes compile times and nothing else, and such a build finds a source that lacks
an include.
"""

def _compile_command(ctx, cc_toolchain, features, context, output):
    # C++ compilation takes the command line's flags in the same order.
    flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts + ctx.attr.copts
    variables = cc_common.create_compile_variables(
        feature_configuration = features,
        cc_toolchain = cc_toolchain,
        source_file = ctx.file.hdr.path,
        output_file = output.path,
        user_compile_flags = flags + ["-x", "c++-header"],
        include_directories = context.includes,
        quote_include_directories = context.quote_includes,
        system_include_directories = context.system_includes,
        preprocessor_defines = context.defines,
        # As Bazel compiles the objects of programs.
        use_pic = ctx.attr.force_pic or ctx.var["COMPILATION_MODE"] != "opt",
    )
    return cc_common.get_memory_inefficient_command_line(
        feature_configuration = features,
        action_name = "c++-compile",
        variables = variables,
    )

def _precompiled_header_impl(ctx):
    cc_toolchain = ctx.attr._cc_toolchain[cc_common.CcToolchainInfo]
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = cc_toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    context = cc_common.merge_cc_infos(
        cc_infos = [dep[CcInfo] for dep in ctx.attr.deps],
    ).compilation_context

    # A folder of their own, so that only this header is found through it.
    folder = ctx.label.name + "_headers"
    header = ctx.actions.declare_file(folder + "/" + ctx.file.hdr.basename)
    ctx.actions.write(header, "")
    headers = [header]
    compiler = cc_common.get_tool_for_action(
        feature_configuration = features,
        action_name = "c++-compile",
    )
    if "gcc" in compiler.rpartition("/")[2]:  # Bazel calls every compiler it finds "compiler".
        image = ctx.actions.declare_file(header.basename + ".gch", sibling = header)
        ctx.actions.run(
            mnemonic = "CppPrecompile",
            executable = compiler,
            arguments = _compile_command(ctx, cc_toolchain, features, context, image),
            inputs = depset(
                [ctx.file.hdr],
                transitive = [context.headers, cc_toolchain.all_files],
            ),
            outputs = [image],
            execution_requirements = {tag: "" for tag in ctx.attr.tags},
        )
        headers.append(image)

    own = cc_common.create_compilation_context(
        headers = depset(headers),
        quote_includes = depset([header.dirname]),
    )
    contexts = [CcInfo(compilation_context = own)]
    if ctx.attr.links:
        contexts += [dep[CcInfo] for dep in ctx.attr.deps]
    else:
        contexts.append(CcInfo(compilation_context = context))
    return [DefaultInfo(files = depset(headers)), cc_common.merge_cc_infos(cc_infos = contexts)]

precompiled_header = rule(
    implementation = _precompiled_header_impl,
    attrs = {
        "copts": attr.string_list(
            doc = "Those of the targets that include it; others make the image useless to them.",
        ),
        "deps": attr.label_list(providers = [CcInfo]),
        "force_pic": attr.bool(doc = "Whether --force_pic is set, which a rule cannot see."),
        "hdr": attr.label(allow_single_file = [".h"], mandatory = True),
        "links": attr.bool(doc = "Whether targets link `deps`, too, or only find their headers."),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
