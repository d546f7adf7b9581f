"""A wheel for the Python and the PyTorch of this machine."""

load("@torch//:python.bzl", "MISSING", "PYTHON")

def _wheel_impl(ctx):
    out = ctx.actions.declare_directory(ctx.label.name)
    if MISSING:
        ctx.actions.run_shell(outputs = [out], command = "echo '%s' >&2; exit 1" % MISSING)
        return [DefaultInfo(files = depset([out]))]
    ctx.actions.run(
        executable = PYTHON,
        arguments = [
            ctx.file.script.path,
            "--library",
            ctx.file.library.path,
            "--include",
            ".",
            "--out",
            out.path,
        ],
        inputs = depset(
            [ctx.file.script, ctx.file.library] + ctx.files.srcs,
            transitive = [dep[CcInfo].compilation_context.headers for dep in ctx.attr.deps],
        ),
        outputs = [out],
        use_default_shell_env = True,
        mnemonic = "Wheel",
        progress_message = "Making the wheel of %s" % ctx.label.package,
    )
    return [DefaultInfo(files = depset([out]))]

_wheel = rule(
    implementation = _wheel_impl,
    attrs = {
        "deps": attr.label_list(providers = [CcInfo], doc = "libraries whose headers are used"),
        "library": attr.label(allow_single_file = True, mandatory = True),
        "script": attr.label(allow_single_file = True, mandatory = True),
        "srcs": attr.label_list(allow_files = True),
    },
)

def wheel(name, **kwargs):
    """The directory <name> with the wheel. Without PyTorch it is no part of //..., and says why it fails."""
    _wheel(name = name, tags = ["manual"] if MISSING else [], **kwargs)
