#include "evenkeel/tools/bench/request.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::bench {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(ParseSizesTest, UnitsArePowersOf1024) {
  EXPECT_THAT(*ParseSizes("sizes", "1,2k, 3M ,1G,64G"),
              ElementsAre(1, 2048, 3 << 20, 1 << 30, int64_t{64} << 30));
  EXPECT_THAT(*ParseSizes("sizes", "1K,1024"), ElementsAre(1024)) << "once";
  EXPECT_THAT(*ParseSizes("sizes", ""), IsEmpty());
}

TEST(ParseSizesTest, RefusesWhatIsNoSize) {
  for (const char* text :
       {"0", "-1", "x", "1KB", "K", "1.5M", "65G", "99999999999999999999", "1K,oops"}) {
    const auto sizes = ParseSizes("loop_sizes", text);
    EXPECT_TRUE(absl::IsInvalidArgument(sizes.status())) << text;
    EXPECT_THAT(sizes.status().message(), HasSubstr("--loop_sizes: \"")) << text;
    EXPECT_THAT(sizes.status().message(), HasSubstr("\" is not a size; pass bytes from 1 to 64G"))
        << text;
  }
}

TEST(ParseOpsTest, NamesOrAll) {
  EXPECT_THAT(*ParseOps("barrier,all_reduce,barrier"), ElementsAre(Op::kBarrier, Op::kAllReduce));
  EXPECT_EQ(ParseOps("all")->size(), std::size(kAllOps));
  EXPECT_EQ(ParseOps("all,reduce")->size(), std::size(kAllOps));
}

TEST(ParseOpsTest, RefusesUnknownOnesAndNone) {
  EXPECT_EQ(ParseOps("allreduce").status().message(),
            "--ops: \"allreduce\" is not known; choose all, all_reduce, reduce_scatter, "
            "all_gather, broadcast, reduce, "
            "all_to_all, send_recv, barrier");
  EXPECT_TRUE(absl::IsInvalidArgument(ParseOps("").status()));
}

TEST(ParseBackendsTest, AutoIsWhatIsThere) {
  const std::vector<std::string> there = {"tcp", "mpich"};
  EXPECT_THAT(*ParseBackends("backends", "auto", there), ElementsAre("tcp", "mpich"));
  EXPECT_THAT(*ParseBackends("backends", "shm,auto,tcp", there),
              ElementsAre("shm", "tcp", "mpich"));
  EXPECT_EQ(ParseBackends("backends", "nccl", there).status().message(),
            "--backends: \"nccl\" is not known; choose auto, tcp, shm, raw_gloo, mpi, "
            "openmpi, mpich");
}

}  // namespace
}  // namespace evenkeel::bench
