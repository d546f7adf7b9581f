"""Several tests of one program, which is compiled and linked once."""

load(":first_tier.bzl", "tier_tags")

BACKENDS = ["shm", "tcp", "hierarchical"]

def _variant_test_impl(ctx):
    program = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.symlink(
        output = program,
        target_file = ctx.executable.test,
        is_executable = True,
    )
    variables = dict(ctx.attr.env)
    if ctx.attr.backend:
        variables["EVENKEEL_TEST_BACKEND"] = ctx.attr.backend
    if ctx.attr.backend == "hierarchical":
        variables["EVENKEEL_HOST_PARTS"] = "2"  # For ranks that are processes.
    return [
        DefaultInfo(
            executable = program,
            runfiles = ctx.attr.test[DefaultInfo].default_runfiles,
        ),
        testing.TestEnvironment(variables),
    ]

_variant_test = rule(
    implementation = _variant_test_impl,
    attrs = {
        "backend": attr.string(),
        "env": attr.string_dict(),
        "test": attr.label(
            cfg = "target",
            executable = True,
            mandatory = True,
        ),
    },
    test = True,
)

def backend_tests(tests, backends = BACKENDS, tags = ["cpu:2", "multirank"], **kwargs):
    """Runs each of these ek_cc_tests once more over each of these backends, see //comm/testing:tested_group.

    Args:
      tests: x_test, or a list of such names; its own target runs over "local". The others are
        x_over_shm_test and so on.
      backends: those of comm/testing/tested_group.h.
      tags: as of cc_test.
      **kwargs: as of cc_test: args, env, shard_count, size.
    """
    for test in tests if type(tests) == type([]) else [tests]:
        for backend in backends:
            name = "%s_over_%s_test" % (test[:-len("_test")], backend)
            _variant_test(
                name = name,
                backend = backend,
                tags = tags + tier_tags(name),
                test = test,
                **kwargs
            )

def few_seeds_test(test, **kwargs):
    """Declares x_of_few_seeds_test, which runs the program of x_test with EVENKEEL_TEST_FEW_SEEDS=1.

    The test reads the variable and runs fewer seeds.

    Args:
      test: x_test.
      **kwargs: as of cc_test: args, shard_count, size, tags.
    """
    name = test[:-len("_test")] + "_of_few_seeds_test"
    if tier_tags(name):
        fail("add //%s:%s to first_tier.bzl: few_seeds_test() is for the first tier only" % (native.package_name(), name))
    _variant_test(
        name = name,
        env = {"EVENKEEL_TEST_FEW_SEEDS": "1"},
        test = test,
        **kwargs
    )
