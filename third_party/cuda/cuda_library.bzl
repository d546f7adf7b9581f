"""Kernels: compiled by nvcc into an image that is data, and by the C++ compiler for the host."""

load("//tools/build_defs:cc.bzl", "ek_cc_library")

def cuda_library(name, src, deps = [], **kwargs):
    """A kernel source, and the image that nvcc makes of it.

    Args:
      name: of the library. Its headers are the source itself, and <name>_image.h,
        which declares `evenkeel::<name>_image` (comm/device/kernel.h says what
        for). Without a toolkit the image is empty.
      src: the source, a .cuh that both compilers understand.
      deps: libraries whose headers it includes.
      **kwargs: as of cc_library.
    """
    image = name + "_image"
    native.genrule(
        name = image,
        outs = [image + ".h", image + ".cc"],
        cmd = "\n".join([
            "cat > $(location {0}.h) <<'END'".format(image),
            "#pragma once",
            "#include \"evenkeel/comm/device/kernel.h\"",
            "namespace evenkeel {",
            "extern const DeviceImage {};".format(image),
            "}",
            "END",
            "cat > $(location {0}.cc) <<'END'".format(image),
            "#include \"evenkeel/{}/{}.h\"".format(native.package_name(), image),
            "namespace evenkeel {",
            "const DeviceImage {};".format(image),
            "}",
            "END",
        ]),
    )
    ek_cc_library(
        name = name,
        srcs = [image + ".cc"],
        hdrs = [src, image + ".h"],
        deps = deps + ["//comm/device:kernel"],
        **kwargs
    )
