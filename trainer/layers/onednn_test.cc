#include "evenkeel/trainer/layers/onednn.h"

#include <gtest/gtest.h>

#include "absl/status/status.h"

namespace evenkeel {
namespace {

TEST(OneDnnTest, TurnsWhatIsThrownIntoAStatus) {
  const absl::Status status = StatusFromOneDnn(
      "layer", []() -> absl::Status { throw dnnl::error(dnnl_unimplemented, "could not"); });
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(status.message(), "could not: layer: oneDNN has no kernel for this on this machine");
}

TEST(OneDnnTest, PassesAStatusOn) {
  EXPECT_EQ(StatusFromOneDnn("layer", [] { return absl::AbortedError("peer"); }),
            absl::AbortedError("peer"));
  EXPECT_TRUE(StatusFromOneDnn("layer", [] { return absl::OkStatus(); }).ok());
}

TEST(OneDnnTest, RealErrorsOfTheLibraryAreCaught) {
  const OneDnn dnn;
  const absl::Status status = StatusFromOneDnn("pool", [&] {
    const dnnl::memory::desc nonsense({-1}, dnnl::memory::data_type::f32,
                                      dnnl::memory::format_tag::a);
    return absl::OkStatus();
  });
  EXPECT_FALSE(status.ok());
}

}  // namespace
}  // namespace evenkeel
