#include "evenkeel/comm/failure_info.h"

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/status.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::ByteReader;
using internal::ByteWriter;

const FailureInfo kLost{.kind = FailureKind::kRankLost,
                        .ranks = {1, 3},
                        .operation = "all_reduce (user) float32[10] sum",
                        .position = 412,
                        .step = 7};

TEST(FailureInfoTest, StaysWithAStatusThatIsAnnotated) {
  const absl::Status status = WithFailureInfo(absl::UnavailableError("rank 1 is lost"), kLost);
  EXPECT_EQ(FailureInfoOf(status), kLost);
  const absl::Status annotated = Annotate(status, "ddp#0");
  EXPECT_EQ(annotated.message(), "ddp#0: rank 1 is lost");
  EXPECT_EQ(FailureInfoOf(annotated), kLost);
}

TEST(FailureInfoTest, AnOkStatusAndAnOrdinaryErrorHaveNone) {
  EXPECT_EQ(FailureInfoOf(absl::OkStatus()), std::nullopt);
  EXPECT_EQ(FailureInfoOf(WithFailureInfo(absl::OkStatus(), kLost)), std::nullopt);
  EXPECT_EQ(FailureInfoOf(absl::InvalidArgumentError("rank 1 is lost")), std::nullopt);
}

TEST(FailureInfoTest, TravelsWithAStatusAsBytes) {
  const absl::Status status = WithFailureInfo(absl::UnavailableError("rank 1 is lost"), kLost);
  const std::string bytes = ByteWriter().Status(status).I32(5).Take();
  ByteReader reader(bytes);
  const absl::Status read = reader.Status();
  EXPECT_EQ(read, status);
  EXPECT_EQ(FailureInfoOf(read), kLost);
  EXPECT_EQ(reader.I32(), 5);
  EXPECT_TRUE(reader.Finish("a status").ok());

  for (size_t size = 0; size < bytes.size(); ++size) {
    ByteReader cut(absl::string_view(bytes).substr(0, size));
    cut.Status().IgnoreError();
    cut.I32();
    EXPECT_FALSE(cut.Finish("a status").ok()) << size;
  }
}

TEST(FailureInfoTest, IsReadableWhereAStatusIsPrinted) {
  const absl::Status status = WithFailureInfo(absl::UnavailableError("rank 1 is lost"), kLost);
  EXPECT_EQ(status.ToString(),
            "UNAVAILABLE: rank 1 is lost [evenkeel/FailureInfo='kind=lost ranks=1,3 position=412 "
            "step=7 operation=all_reduce (user) float32[10] sum']");
}

TEST(FailureInfoTest, AForeignPayloadIsNone) {
  for (const char* text : {"", "kind=lost", "kind=lost ranks=x position=1 step=1 operation=",
                           "kind=lost ranks=1 position= step=1 operation="}) {
    absl::Status status = absl::UnavailableError("rank 1 is lost");
    status.SetPayload(internal::kFailureInfoType, absl::Cord(text));
    EXPECT_EQ(FailureInfoOf(status), std::nullopt) << text;
  }
}

TEST(FailureInfoTest, AnUnknownCodeIsRefused) {
  const std::string bytes = ByteWriter().U8(17).Bytes("x").Bytes("").Take();
  ByteReader reader(bytes);
  reader.Status().IgnoreError();
  EXPECT_FALSE(reader.Finish("a status").ok());
}

}  // namespace
}  // namespace evenkeel
