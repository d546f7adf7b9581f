"""Kernels: compiled by nvcc into an image that is data, and by the C++ compiler for the host."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load("@cuda//:toolkit.bzl", "NVCC", "NVCC_ARCHS")
load("//tools/build_defs:cc.bzl", "ek_cc_library")

_HEADER = """\
#pragma once
#include "evenkeel/comm/device/kernel.h"
namespace evenkeel {{
extern const DeviceImage {name};
}}
"""

_EMPTY = """\
#include "{header}"
namespace evenkeel {{
const DeviceImage {name};
}}
"""

# od writes 4 bytes as one number: a quarter of the text, and of the C++ compiler's time.
# nvcc names what it leaves behind for a moment by its process number, which is the same in every sandbox: each has a
# folder of its own for it.
_COMPILE = """\
set -euo pipefail
TMPDIR=$(mktemp -d)
export TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
"$@"
bytes=$(wc -c <"{fatbin}")
{{
  echo '#include "{header}"'
  echo 'namespace {{'
  echo 'alignas(64) constexpr unsigned int kWords[] = {{'
  od -An -v -tx4 "{fatbin}" | sed 's/ \\([0-9a-f]*\\)/0x\\1,/g'
  echo '}};'
  echo '}}  // namespace'
  echo 'namespace evenkeel {{'
  echo "const DeviceImage {name}{{reinterpret_cast<const unsigned char*>(kWords), $bytes}};"
  echo '}}'
}} >"{source}"
"""

def _gencode(arch):
    virtual = arch.replace("sm_", "compute_")
    if virtual == arch and not arch.startswith("compute_"):
        fail("EVENKEEL_CUDA_ARCHS: '{}' is neither sm_XX nor compute_XX".format(arch))
    return "arch={},code={}".format(virtual, arch)

def _include_flags(context):
    flags = []
    for folder in context.includes.to_list() + context.system_includes.to_list():
        flags += ["-I", folder]
    for folder in context.quote_includes.to_list():
        flags += ["-Xcompiler", "-iquote," + folder]
    return flags

def _cuda_image_impl(ctx):
    header, source = ctx.outputs.header, ctx.outputs.source
    names = {
        "name": ctx.label.name,
        "header": "evenkeel/{}/{}".format(ctx.label.package, header.basename),
    }
    ctx.actions.write(header, _HEADER.format(**names))
    if not NVCC:
        ctx.actions.write(source, _EMPTY.format(**names))
        return

    # Only the libraries' own headers: those behind them (Abseil) are not for nvcc, and do not make
    # it run.
    contexts = [dep[CcInfo].compilation_context for dep in ctx.attr.deps]
    merged = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps]).compilation_context
    headers = []
    for context in contexts:
        headers += context.direct_headers

    fatbin = ctx.actions.declare_file(ctx.label.name + ".fatbin")
    command = ctx.actions.args()
    command.add_all([
        NVCC,
        "-x",
        "cu",
        "-std=c++20",
        "-O3",
        "--fatbin",
        "--no-compress",  # Nearly as small, loads faster, and names can be found in it.
        "-ccbin",
        find_cpp_toolchain(ctx).compiler_executable,
    ])
    for arch in NVCC_ARCHS:
        command.add("-gencode", _gencode(arch))
    command.add_all(_include_flags(merged))
    command.add_all([flag for flag in ctx.var.get("nvcc_copts", "").split(" ") if flag])
    command.add_all(ctx.attr.nvcc_copts)
    command.add_all([ctx.file.src, "-o", fatbin])
    ctx.actions.run_shell(
        command = _COMPILE.format(fatbin = fatbin.path, source = source.path, **names),
        arguments = [command],
        inputs = depset([ctx.file.src] + headers),
        tools = find_cpp_toolchain(ctx).all_files,
        outputs = [fatbin, source],
        mnemonic = "CudaCompile",
        progress_message = "Compiling kernels of %s" % ctx.file.src.short_path,
        use_default_shell_env = True,
    )

_cuda_image = rule(
    implementation = _cuda_image_impl,
    attrs = {
        "src": attr.label(allow_single_file = [".cuh"], mandatory = True),
        "deps": attr.label_list(providers = [CcInfo]),
        "header": attr.output(mandatory = True),
        "source": attr.output(mandatory = True),
        "nvcc_copts": attr.string_list(),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
    incompatible_use_toolchain_transition = True,
)

def cuda_library(name, src, deps = [], nvcc_copts = [], **kwargs):
    """A kernel source, and the image that nvcc makes of it.

    The image has code for sm_75, sm_80 and sm_90 and PTX of compute_90, for
    drivers to compile on newer devices. Other ones:

        EVENKEEL_CUDA_ARCHS=sm_86,compute_86 bazel build ...

    `--define=nvcc_copts='-lineinfo -Werror=all-warnings'` adds to nvcc's
    command line. The host compiler is the one of the build.

    Args:
      name: of the library. Its headers are the source itself, and <name>_image.h,
        which declares `evenkeel::<name>_image` (comm/device/kernel.h says what
        for). Without a toolkit the image is empty.
      src: the source, a .cuh that both compilers understand.
      deps: libraries whose headers it includes. nvcc sees only the headers of
        these libraries and of //comm/device:kernel, not those behind them.
      nvcc_copts: more arguments of nvcc.
      **kwargs: as of cc_library.
    """
    image = name + "_image"
    all_deps = deps + [str(Label("//comm/device:kernel"))]
    _cuda_image(
        name = image,
        src = src,
        deps = all_deps,
        header = image + ".h",
        source = image + ".cc",
        nvcc_copts = nvcc_copts,
        testonly = kwargs.get("testonly", False),
    )
    ek_cc_library(
        name = name,
        srcs = [image + ".cc"],
        hdrs = [src, image + ".h"],
        deps = all_deps,
        **kwargs
    )
