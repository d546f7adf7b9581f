"""The CUDA toolkit, NCCL and cuDNN: CUDA_HOME if set, else /usr/local/cuda.

What is not there becomes an incompatible target, so that `bazel test //...`
skips whatever needs it: nothing is built with CUDA without a toolkit, and all
but //comm/nccl is built without NCCL. For each there is a config_setting
`has_<name>`, for select(). The targets:

  headers     of the toolkit
  cudart      the runtime, linked in: a program starts where there is no CUDA
  nccl        its headers: programs load the library (comm/device/shared_library.h)
  cublasLt, cudnn    likewise: has_cublasLt and has_cudnn say whether there are headers
  cupti       for tests that look at what was called
  has_nvcc    whether cuda_library() compiles (nvcc of CUDA 12 or newer)

toolkit.bzl has, for tests, the toolkit's folder and those of the loaded
libraries; and what cuda_library() runs: for the architectures of
EVENKEEL_CUDA_ARCHS, such as "sm_86,compute_86", else for _ARCHS.
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

_CUDART = """
cc_library(
    name = "cudart",
    srcs = ["libcudart_static.a"],
    linkopts = [
        "-ldl",
        "-lrt",
        "-pthread",
    ],
    deps = [":headers"],
)
"""

_CUPTI = """
cc_library(
    name = "cupti",
    linkopts = [
        "-L{folder}",
        "-Wl,-rpath,{folder}",
        "-lcupti",
    ],
    deps = [":cudart"],
)
"""

_NCCL = """
cc_library(
    name = "nccl",
    deps = [":cudart"],
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

_TOOLKIT = """\
# Of the toolkit that was found; None and nothing without one.
NVCC = {nvcc}
NVCC_ARCHS = {archs}
TOOLKIT_FOLDER = "{home}"

# Where the libraries are; empty if only the header was found, or if programs do not search there.
CUBLASLT_FOLDER = "{cublasLt}"
CUDNN_FOLDER = "{cudnn}"
NCCL_FOLDER = "{nccl}"
"""

# Where packages for Debian and Ubuntu, of NVIDIA's and of their own, put headers that are not the toolkit's.
_HEADER_FOLDERS = ["/usr/include", "/usr/include/x86_64-linux-gnu", "/usr/include/aarch64-linux-gnu"]

_OLDEST_NVCC = 12  # The first with C++20.

# Turing, Ampere and Hopper, and what drivers compile for what came later.
_ARCHS = ["sm_75", "sm_80", "sm_90", "compute_90"]

def _exists(repository_ctx, path):
    return repository_ctx.path(path).exists

def _toolkit(repository_ctx):
    home = repository_ctx.os.environ.get("CUDA_HOME", "") or "/usr/local/cuda"
    return home if _exists(repository_ctx, home + "/include/cuda_runtime.h") else None

def _nvcc(repository_ctx, home):
    """The path of a compiler that can be used, and the architectures to compile for: of ours, those that it knows."""
    nvcc = home + "/bin/nvcc"
    if not _exists(repository_ctx, nvcc):
        return None, []
    said = repository_ctx.execute([nvcc, "--version"]).stdout
    major = said.partition("release ")[2].partition(".")[0]
    if not major.isdigit() or int(major) < _OLDEST_NVCC:
        # buildifier: disable=print
        print("{} is older than CUDA {}: no kernels are compiled".format(nvcc, _OLDEST_NVCC))
        return None, []
    chosen = repository_ctx.os.environ.get("EVENKEEL_CUDA_ARCHS", "")
    if chosen:
        return nvcc, chosen.split(",")
    known = repository_ctx.execute([nvcc, "--list-gpu-code"]).stdout.split("\n")
    return nvcc, [a for a in _ARCHS if a.replace("compute_", "sm_") in known]

def _has_header(repository_ctx, header, home):
    places = [home + "/include"] + _HEADER_FOLDERS if home else []
    return bool([p for p in places if _exists(repository_ctx, p + "/" + header)])

def _folder_of(repository_ctx, library, header, home, folders):
    """The folder with the library, if its header is there as well."""
    if not _has_header(repository_ctx, header, home):
        return None
    for folder in folders:
        if _exists(repository_ctx, folder + "/" + library):
            return folder
    return None

def _is_searched(repository_ctx, folder, home):
    """Whether programs find libraries in this folder (FilesOfCuda() of comm/device/shared_library.h)."""
    searched = repository_ctx.path("/usr/local/cuda/lib64")
    return not folder.startswith(home + "/") or repository_ctx.path(folder).realpath == searched.realpath

def _has(name, is_there):
    return _HAS.format(name, "@platforms//os:linux" if is_there else "@platforms//:incompatible")

def _cuda_impl(repository_ctx):
    home = _toolkit(repository_ctx)
    folders = library_folders(repository_ctx)
    nvcc, archs = None, []
    text = _HEAD
    if home:
        repository_ctx.symlink(home + "/include", "include")
        folders = [home + "/lib64", home + "/lib", home + "/extras/CUPTI/lib64"] + folders
        nvcc, archs = _nvcc(repository_ctx, home)
        text += _HEADERS
    else:
        text += _INCOMPATIBLE.format("headers")
    text += _has("nvcc", nvcc)

    folder = _folder_of(repository_ctx, "libcudart_static.a", "cuda_runtime.h", home, folders)
    text += _has("cudart", folder)
    text += _CUDART if folder else _INCOMPATIBLE.format("cudart")
    if folder:
        repository_ctx.symlink(folder + "/libcudart_static.a", "libcudart_static.a")

    loaded = {}
    for name, library, header in [
        ("nccl", "libnccl.so.2", "nccl.h"),
        ("cublasLt", "libcublasLt.so", "cublasLt.h"),
        ("cudnn", "libcudnn.so", "cudnn.h"),
    ]:
        found = _folder_of(repository_ctx, library, header, home, folders)
        loaded[name] = found if found and _is_searched(repository_ctx, found, home) else ""
        is_there = folder and _has_header(repository_ctx, header, home)
        text += _has(name, is_there)
        if name == "nccl":
            text += _NCCL if is_there else _INCOMPATIBLE.format(name)

    folder = _folder_of(repository_ctx, "libcupti.so", "cupti.h", home, folders)
    text += _CUPTI.format(folder = folder) if folder else _INCOMPATIBLE.format("cupti")

    repository_ctx.file("toolkit.bzl", _TOOLKIT.format(nvcc = repr(nvcc), archs = repr(archs), home = home or "", **loaded))
    repository_ctx.file("BUILD", text)

cuda_repository = repository_rule(
    implementation = _cuda_impl,
    local = True,
    configure = True,
    environ = ["CUDA_HOME", "EVENKEEL_CUDA_ARCHS"],
)
