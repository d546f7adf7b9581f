// Included before the first line of sources that include libtorch.h; see
// ../tools/build_defs/precompiled_header.bzl.

#include <torch/torch.h>
