// The options of an operation: several parts, a scale, no contribution of its own.

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/tests/conformance/placed.h"
#include "evenkeel/tests/conformance/reference.h"
#include "evenkeel/tests/conformance/tested_backend.h"
#include "evenkeel/tests/conformance/world_test.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

class OptionsTest : public WorldTest {};  // World size.

// `data` in parts of several sizes, one of them empty.
std::vector<TensorView> Parts(TensorView whole) {
  std::vector<TensorView> parts;
  int64_t begin = 0;
  for (int64_t length : {int64_t{1}, int64_t{0}, int64_t{7}, whole.count - 8}) {
    parts.push_back(whole.Slice(begin, length));
    begin += length;
  }
  return parts;
}

// Types whose sums a backend lacks are reductions.cc's.
template <typename T>
bool Sums(Communicator& comm) {
  return comm.Supports({.kind = CollectiveKind::kAllReduce, .dtype = DTypeOf<T>::value, .count = 1})
      .ok();
}

TEST_P(OptionsTest, PartsBehaveLikeOneTensor) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    return ForEachType([&](auto type) -> absl::Status {
      using T = typename decltype(type)::type;
      for (int64_t n : {8, 100, 50000}) {
        if (Sums<T>(comm)) {
          std::vector<T> reduced = Inputs<T>(ReduceOp::kSum, comm.rank(), n);
          EK_ASSIGN_OR_RETURN(Placed<T> placed, Place(comm, reduced));
          EK_RETURN_IF_ERROR(comm.user().AllReduce(Parts(placed.view()), ReduceOp::kSum).Wait());
          EK_RETURN_IF_ERROR(placed.Fetch());
          EK_RETURN_IF_ERROR(ExpectEqual(
              "all_reduce in parts", reduced,
              Reduced<T>(ReduceOp::kSum, AllRanks(comm.world_size()), comm.world_size(), n)));
        }
        const int root = comm.world_size() - 1;
        std::vector<T> sent = Inputs<T>(ReduceOp::kSum, comm.rank(), n);
        EK_ASSIGN_OR_RETURN(Placed<T> placed, Place(comm, sent));
        EK_RETURN_IF_ERROR(comm.user().Broadcast(Parts(placed.view()), root).Wait());
        EK_RETURN_IF_ERROR(placed.Fetch());
        EK_RETURN_IF_ERROR(
            ExpectEqual("broadcast in parts", sent, Inputs<T>(ReduceOp::kSum, root, n)));
      }
      return absl::OkStatus();
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Parts that lie in memory in another order than they are given.
TEST_P(OptionsTest, PartsMayLieAnywhere) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    std::vector<int32_t> data = {comm.rank(), 10, 20, 30, 40, 50};
    EK_ASSIGN_OR_RETURN(Placed<int32_t> placed, Place(comm, data));
    const TensorView whole = placed.view();
    EK_RETURN_IF_ERROR(
        comm.user()
            .AllReduce({whole.Slice(4, 2), whole.Slice(0, 1), whole.Slice(2, 1)}, ReduceOp::kSum)
            .Wait());
    EK_RETURN_IF_ERROR(placed.Fetch());
    const int w = comm.world_size();
    EXPECT_EQ(data, (std::vector<int32_t>{w * (w - 1) / 2, 10, 20 * w, 30, 40 * w, 50 * w}));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(OptionsTest, NoPartsAtAllIsAnOperationToo) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    EK_RETURN_IF_ERROR(
        comm.user().AllReduce(absl::Span<const TensorView>(), ReduceOp::kSum).Wait());
    return comm.user().Broadcast(absl::Span<const TensorView>(), 0).Wait();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A power of two, so that it rounds nothing wherever a backend applies it.
TEST_P(OptionsTest, ScaleMultipliesTheResult) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    const int w = comm.world_size();
    const std::vector<int> all = AllRanks(w);
    return ForEachType([&](auto type) -> absl::Status {
      using T = typename decltype(type)::type;
      if constexpr (!kIsFloat<T>) {
        return absl::OkStatus();
      } else {
        for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
          std::vector<T> data = Inputs<T>(op, comm.rank(), 1000);
          EK_ASSIGN_OR_RETURN(Placed<T> placed, Place(comm, data));
          EK_RETURN_IF_ERROR(comm.user().AllReduce(placed.view(), op, {.scale = 0.5}).Wait());
          EK_RETURN_IF_ERROR(placed.Fetch());
          EK_RETURN_IF_ERROR(ExpectEqual(absl::StrCat("all_reduce ", ToString(op), " with a scale"),
                                         data, Reduced<T>(op, all, w, 1000, 0.5)));
        }
        std::vector<T> input = Inputs<T>(ReduceOp::kSum, comm.rank(), 100 * w);
        std::vector<T> output(100);
        EK_ASSIGN_OR_RETURN(Placed<T> in, Place(comm, input));
        EK_ASSIGN_OR_RETURN(Placed<T> out, Place(comm, output));
        EK_RETURN_IF_ERROR(
            comm.user().ReduceScatter(in.view(), out.view(), ReduceOp::kSum, {.scale = 4}).Wait());
        EK_RETURN_IF_ERROR(out.Fetch());
        const std::vector<T> sums = Reduced<T>(ReduceOp::kSum, all, w, 100 * w, 4);
        EK_RETURN_IF_ERROR(ExpectEqual(
            "reduce_scatter with a scale", output,
            {sums.begin() + 100 * comm.rank(), sums.begin() + 100 * (comm.rank() + 1)}));
        std::vector<T> rooted = Inputs<T>(ReduceOp::kSum, comm.rank(), 10);
        EK_ASSIGN_OR_RETURN(Placed<T> placed, Place(comm, rooted));
        EK_RETURN_IF_ERROR(
            comm.user().Reduce(placed.view(), ReduceOp::kSum, 0, {.scale = 4}).Wait());
        if (comm.rank() > 0) return absl::OkStatus();
        EK_RETURN_IF_ERROR(placed.Fetch());
        return ExpectEqual("reduce with a scale", rooted,
                           Reduced<T>(ReduceOp::kSum, all, w, 10, 4));
      }
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(OptionsTest, ScaleLeavesIntegersAlone) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    std::vector<int32_t> data(10, 3);
    EK_ASSIGN_OR_RETURN(Placed<int32_t> placed, Place(comm, data));
    EK_RETURN_IF_ERROR(comm.user().AllReduce(placed.view(), ReduceOp::kSum, {.scale = 0.5}).Wait());
    EK_RETURN_IF_ERROR(placed.Fetch());
    return ExpectEqual("all_reduce", data, std::vector<int32_t>(10, 3 * comm.world_size()));
  });
  EXPECT_TRUE(status.ok()) << status;
}

// The behaviour of an exhausted rank: its buffer holds values, which no rank may see.
TEST_P(OptionsTest, RanksThatDoNotContributeOnlyReceive) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    const int w = comm.world_size();
    return ForEachType([&](auto type) -> absl::Status {
      using T = typename decltype(type)::type;
      if (!Sums<T>(comm)) return absl::OkStatus();
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
        for (int active : std::set<int>{1, (w + 1) / 2, w}) {
          // The ranks from `first` on, round the corner, so that the lowest rank is inactive too.
          const int first = active % w;
          const CallOptions options{.contributes = (comm.rank() - first + w) % w < active};
          std::vector<int> contributors;
          for (int rank : AllRanks(w)) {
            if ((rank - first + w) % w < active) contributors.push_back(rank);
          }
          std::vector<T> data = Inputs<T>(op, comm.rank(), 500);
          if (!options.contributes) std::fill(data.begin(), data.end(), T(99));
          EK_ASSIGN_OR_RETURN(Placed<T> placed, Place(comm, data));
          EK_RETURN_IF_ERROR(comm.user().AllReduce(placed.view(), op, options).Wait());
          EK_RETURN_IF_ERROR(placed.Fetch());
          EK_RETURN_IF_ERROR(ExpectEqual(absl::StrCat("all_reduce ", ToString(op), " of ", active),
                                         data, Reduced<T>(op, contributors, w, 500)));

          std::vector<T> input = Inputs<T>(op, comm.rank(), 50 * w);
          if (!options.contributes) std::fill(input.begin(), input.end(), T(99));
          std::vector<T> output(50);
          EK_ASSIGN_OR_RETURN(Placed<T> in, Place(comm, input));
          EK_ASSIGN_OR_RETURN(Placed<T> out, Place(comm, output));
          EK_RETURN_IF_ERROR(comm.user().ReduceScatter(in.view(), out.view(), op, options).Wait());
          EK_RETURN_IF_ERROR(out.Fetch());
          const std::vector<T> all = Reduced<T>(op, contributors, w, 50 * w);
          EK_RETURN_IF_ERROR(
              ExpectEqual(absl::StrCat("reduce_scatter ", ToString(op), " of ", active), output,
                          {all.begin() + 50 * comm.rank(), all.begin() + 50 * (comm.rank() + 1)}));
        }
      }
      return absl::OkStatus();
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

// The divisor is the group's size, whoever has something to add.
TEST_P(OptionsTest, AverageCountsThoseWhoDoNotContribute) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    const int w = comm.world_size();
    const CallOptions options{.contributes = comm.rank() == w - 1};
    std::vector<int32_t> integers(10, -32);
    EK_ASSIGN_OR_RETURN(Placed<int32_t> placed_integers, Place(comm, integers));
    const absl::Status averaged =
        comm.user().AllReduce(placed_integers.view(), ReduceOp::kAverage, options).Wait();
    EK_RETURN_IF_ERROR(placed_integers.Fetch());
    if (comm.device().is_cpu()) {
      EK_RETURN_IF_ERROR(averaged);
      EXPECT_EQ(integers, std::vector<int32_t>(10, -32 / w));
    } else {  // There is none on a device.
      EXPECT_EQ(averaged.code(), absl::StatusCode::kUnimplemented) << averaged;
      EXPECT_EQ(integers, std::vector<int32_t>(10, -32));
    }
    std::vector<double> floats(10, 3.0 * w);
    EK_ASSIGN_OR_RETURN(Placed<double> placed_floats, Place(comm, floats));
    EK_RETURN_IF_ERROR(
        comm.user().AllReduce(placed_floats.view(), ReduceOp::kAverage, options).Wait());
    EK_RETURN_IF_ERROR(placed_floats.Fetch());
    EXPECT_NEAR(floats[9], 3.0, 1e-14);  // 1/w and the product with it are rounded.
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(OptionsTest, NobodysContributionIsTheIdentity) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    std::vector<float> sum(100, 5.0f);
    EK_ASSIGN_OR_RETURN(Placed<float> placed_sum, Place(comm, sum));
    EK_RETURN_IF_ERROR(
        comm.user().AllReduce(placed_sum.view(), ReduceOp::kSum, {.contributes = false}).Wait());
    EK_RETURN_IF_ERROR(placed_sum.Fetch());
    EK_RETURN_IF_ERROR(ExpectEqual("sum of nothing", sum, std::vector<float>(100, 0.0f)));
    std::vector<int64_t> product(100, 5);
    EK_ASSIGN_OR_RETURN(Placed<int64_t> placed_product, Place(comm, product));
    EK_RETURN_IF_ERROR(
        comm.user()
            .AllReduce(placed_product.view(), ReduceOp::kProduct, {.contributes = false})
            .Wait());
    EK_RETURN_IF_ERROR(placed_product.Fetch());
    return ExpectEqual("product of nothing", product, std::vector<int64_t>(100, 1));
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(OptionsTest, InPlaceSharesOfOneBufferWork) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    const int w = comm.world_size();
    constexpr int64_t kCount = 20000;
    std::vector<float> flat = Inputs<float>(ReduceOp::kSum, comm.rank(), kCount * w);
    EK_ASSIGN_OR_RETURN(Placed<float> placed, Place(comm, flat));
    const TensorView whole = placed.view();
    const TensorView mine = whole.Slice(comm.rank() * kCount, kCount);
    EK_RETURN_IF_ERROR(comm.ReduceScatter(whole, mine, ReduceOp::kSum));
    EK_RETURN_IF_ERROR(comm.AllGather(mine, whole));
    EK_RETURN_IF_ERROR(placed.Fetch());
    return ExpectEqual("reduce_scatter, all_gather", flat,
                       Reduced<float>(ReduceOp::kSum, AllRanks(w), w, kCount * w));
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(WorldSize, OptionsTest, testing::ValuesIn(WorldSizes()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace evenkeel
