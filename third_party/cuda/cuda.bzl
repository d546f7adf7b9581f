"""The CUDA toolkit and NCCL: CUDA_HOME if set, else /usr/local/cuda.

What is not there becomes an incompatible target, so that `bazel test //...`
skips whatever needs it.
"""

load("//third_party/debian:system_library.bzl", "library_folders")

_HEAD = "package(default_visibility = [\"//visibility:public\"])\n"

_HEADERS = """
cc_library(
    name = "headers",
    hdrs = glob([
        "include/*.h",
        "include/*.hpp",
        "include/crt/**",
        "include/nccl_device/**",
        "include/nv/**",
        "include/nvtx3/**",
    ]),
    includes = ["include"],
)
"""

_LIBRARY = """
cc_library(
    name = "{name}",
    linkopts = [
        "-L{folder}",
        "-Wl,-rpath,{folder}",
        "-l{library}",
    ],
    deps = [{deps}],
)
"""

# True or false for good: everything here runs on Linux, and nothing is incompatible with itself.
_HAS = """
config_setting(
    name = "has_{}",
    constraint_values = ["{}"],
)
"""

_INCOMPATIBLE = """
cc_library(
    name = "{}",
    target_compatible_with = ["@platforms//:incompatible"],
)
"""

def _toolkit(repository_ctx):
    home = repository_ctx.os.environ.get("CUDA_HOME", "") or "/usr/local/cuda"
    if repository_ctx.path(home + "/include/cuda_runtime.h").exists:
        return home
    return None

def _cuda_impl(repository_ctx):
    home = _toolkit(repository_ctx)
    folders = library_folders(repository_ctx)
    text = _HEAD
    if home:
        repository_ctx.symlink(home + "/include", "include")
        folders = [home + "/lib64", home + "/lib"] + folders
        text += _HEADERS
    else:
        text += _INCOMPATIBLE.format("headers")

    for name, header, deps in [
        ("cudart", "cuda_runtime.h", []),
        ("cublas", "cublas_v2.h", [":cudart"]),
        ("cudnn", "cudnn.h", [":cudart"]),
        ("nccl", "nccl.h", [":cudart"]),
    ]:
        folder = None
        if home and (repository_ctx.path(home + "/include/" + header).exists or
                     repository_ctx.path("/usr/include/" + header).exists):
            for candidate in folders:
                if repository_ctx.path("{}/lib{}.so".format(candidate, name)).exists:
                    folder = candidate
                    break
        text += _HAS.format(name, "@platforms//os:linux" if folder else "@platforms//:incompatible")
        if folder:
            text += _LIBRARY.format(
                name = name,
                folder = folder,
                library = name,
                deps = ", ".join(["\"{}\"".format(d) for d in [":headers"] + deps]),
            )
        else:
            text += _INCOMPATIBLE.format(name)
    repository_ctx.file("BUILD", text)

cuda_repository = repository_rule(
    implementation = _cuda_impl,
    local = True,
    configure = True,
    environ = ["CUDA_HOME"],
)
