// Included before the first line of what includes libtorch (../tools/build_defs/precompiled_header.bzl).

#include <torch/torch.h>
