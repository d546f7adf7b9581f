"""Tests of device code that run on simulated devices, and again on a GPU."""

load("//tools/build_defs:cc.bzl", "ek_cc_test")

def device_test(name, deps = [], tags = [], gpu_deps = [], copts = [], **kwargs):
    """Two tests of one source, whose devices are TestedDevices (testing/tested_devices.h).

    Args:
      name: x_test; the second one, with the tags "gpu" and "exclusive", is
        x_on_gpu_test.
      deps: as of cc_test; //comm/device:tested_devices comes by itself.
      tags: as of cc_test.
      gpu_deps: of the second one alone.
      copts: as of cc_test.
      **kwargs: as of cc_test.
    """
    ek_cc_test(
        name = name,
        copts = copts,
        tags = tags,
        deps = deps + ["//comm/device:tested_devices"],
        **kwargs
    )
    ek_cc_test(
        name = name[:-len("_test")] + "_on_gpu_test",
        srcs = [name + ".cc"],
        copts = copts + ["-DEK_TEST_ON_CUDA"],
        tags = tags + [
            "exclusive",
            "gpu",
        ],
        deps = deps + gpu_deps + [
            "//comm/device:managed_devices",
            "//comm/device:tested_devices",
        ],
        **kwargs
    )
