// Every type, reduction and reducing operation against the plain loop.

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
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

class ReductionTest : public WorldTest {};  // World size.

// An average of floats multiplies by 1/w, which rounds: once for the factor, then at each
// contribution and each addition or at the end. Each of the at most 2w + 1 roundings is of a value
// of at most 3 (the mean of the inputs' amounts).
template <typename T>
double BoundOf(ReduceOp op, int world_size) {
  if (op != ReduceOp::kAverage || Tested().adds_in_rank_order) return 0.0;
  return 3.0 * (2 * world_size + 1) * Rounding<T>();
}

// Whether `what` can be tested here. What is not supported must say so, and do no harm.
absl::StatusOr<bool> CanRun(Communicator& comm, const Collective& what, TensorView in,
                            TensorView out) {
  const absl::Status supported = comm.Supports(what);
  if (supported.ok()) return true;
  if (!absl::IsUnimplemented(supported)) return supported;
  const absl::Status issued = comm.user().Issue(what, {in}, {out}).Wait();
  if (absl::IsUnimplemented(issued)) return false;
  return absl::InternalError(
      absl::StrCat(ToString(what), " is not supported, and answered ", issued.ToString()));
}

template <typename T>
absl::Status CheckAllReduce(Communicator& comm, ReduceOp op, int64_t n) {
  std::vector<T> data = Inputs<T>(op, comm.rank(), n);
  EK_ASSIGN_OR_RETURN(Placed<T> placed, Place(comm, data));
  const TensorView view = placed.view();
  const Collective what{
      .kind = CollectiveKind::kAllReduce, .dtype = view.dtype, .count = n, .op = op};
  EK_ASSIGN_OR_RETURN(bool can_run, CanRun(comm, what, view, view));
  if (!can_run) return absl::OkStatus();
  EK_RETURN_IF_ERROR(comm.AllReduce(view, op));
  EK_RETURN_IF_ERROR(placed.Fetch());
  return ExpectNear(ToString(what), data,
                    Reduced<T>(op, AllRanks(comm.world_size()), comm.world_size(), n),
                    BoundOf<T>(op, comm.world_size()));
}

template <typename T>
absl::Status CheckReduce(Communicator& comm, ReduceOp op, int64_t n) {
  const int root = static_cast<int>((n + static_cast<int>(op)) % comm.world_size());
  std::vector<T> data = Inputs<T>(op, comm.rank(), n);
  EK_ASSIGN_OR_RETURN(Placed<T> placed, Place(comm, data));
  const TensorView view = placed.view();
  const Collective what{
      .kind = CollectiveKind::kReduce, .dtype = view.dtype, .count = n, .op = op, .root = root};
  EK_ASSIGN_OR_RETURN(bool can_run, CanRun(comm, what, view, view));
  if (!can_run) return absl::OkStatus();
  EK_RETURN_IF_ERROR(comm.user().Reduce(view, op, root).Wait());
  if (comm.rank() != root) return absl::OkStatus();
  EK_RETURN_IF_ERROR(placed.Fetch());
  return ExpectNear(ToString(what), data,
                    Reduced<T>(op, AllRanks(comm.world_size()), comm.world_size(), n),
                    BoundOf<T>(op, comm.world_size()));
}

template <typename T>
absl::Status CheckReduceScatter(Communicator& comm, ReduceOp op, int64_t n) {
  const int world_size = comm.world_size();
  std::vector<T> input = Inputs<T>(op, comm.rank(), n * world_size);
  std::vector<T> output(n);
  EK_ASSIGN_OR_RETURN(Placed<T> placed_input, Place(comm, input));
  EK_ASSIGN_OR_RETURN(Placed<T> placed_output, Place(comm, output));
  const TensorView in = placed_input.view(), out = placed_output.view();
  const Collective what{
      .kind = CollectiveKind::kReduceScatter, .dtype = in.dtype, .count = n, .op = op};
  EK_ASSIGN_OR_RETURN(bool can_run, CanRun(comm, what, in, out));
  if (!can_run) return absl::OkStatus();
  EK_RETURN_IF_ERROR(comm.ReduceScatter(in, out, op));
  EK_RETURN_IF_ERROR(placed_output.Fetch());
  const std::vector<T> all = Reduced<T>(op, AllRanks(world_size), world_size, n * world_size);
  const std::vector<T> mine(all.begin() + comm.rank() * n, all.begin() + (comm.rank() + 1) * n);
  return ExpectNear(ToString(what), output, mine, BoundOf<T>(op, world_size));
}

template <typename Check>
absl::Status ForEachReduction(const std::vector<int64_t>& sizes, Check check) {
  return ForEachType([&](auto type) -> absl::Status {
    using T = typename decltype(type)::type;
    for (ReduceOp op : kAllReduceOps) {
      if (IsBitwise(op) && kIsFloat<T>) continue;
      for (int64_t n : sizes) EK_RETURN_IF_ERROR(check(type, op, n));
    }
    return absl::OkStatus();
  });
}

TEST_P(ReductionTest, AllReduceGivesThePlainResult) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) {
    return ForEachReduction({0, 1, 3, 17, 1000}, [&](auto type, ReduceOp op, int64_t n) {
      return CheckAllReduce<typename decltype(type)::type>(comm, op, n);
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(ReductionTest, ReduceGivesThePlainResultToTheRoot) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) {
    return ForEachReduction({0, 1, 3, 17, 1000}, [&](auto type, ReduceOp op, int64_t n) {
      return CheckReduce<typename decltype(type)::type>(comm, op, n);
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(ReductionTest, ReduceScatterGivesEachRankItsShare) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) {
    return ForEachReduction({0, 1, 3, 17, 1000}, [&](auto type, ReduceOp op, int64_t n) {
      return CheckReduceScatter<typename decltype(type)::type>(comm, op, n);
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(ReductionTest, LargerThanOnePieceOfTheTransport) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    return ForEachType([&](auto type) -> absl::Status {
      using T = typename decltype(type)::type;
      EK_RETURN_IF_ERROR(CheckAllReduce<T>(comm, ReduceOp::kSum, 65537));
      EK_RETURN_IF_ERROR(CheckReduce<T>(comm, ReduceOp::kMax, 65537));
      return CheckReduceScatter<T>(comm, ReduceOp::kProduct, 65537 / comm.world_size());
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Numbers that do need rounding.
TEST_P(ReductionTest, RoundsLikeAPlainSumOrNearly) {
  constexpr int64_t kCount = 10007;
  const auto input = [](int rank, int64_t i) {
    return static_cast<float>(StableHash(rank, i) >> 40) / (1 << 24) - 0.3f;  // -0.3 to 0.7
  };
  absl::Status status = RunTested(GetParam(), [&](Communicator& comm) -> absl::Status {
    const int world_size = comm.world_size();
    std::vector<float> data(kCount);
    for (int64_t i = 0; i < kCount; ++i) data[i] = input(comm.rank(), i);
    EK_ASSIGN_OR_RETURN(Placed<float> placed, Place(comm, data));
    EK_RETURN_IF_ERROR(comm.AllReduce(placed.view(), ReduceOp::kSum));
    EK_RETURN_IF_ERROR(placed.Fetch());
    for (int64_t i = 0; i < kCount; ++i) {
      float in_order = input(0, i);
      double exact = in_order, amount = std::abs(in_order);
      for (int rank = 1; rank < world_size; ++rank) {
        in_order += input(rank, i);
        exact += input(rank, i);
        amount += std::abs(input(rank, i));
      }
      // w - 1 additions, in whichever order, each of which rounds a value of at most `amount`, a
      // little more for the roundings before.
      const double bound = (world_size - 1) * Rounding<float>() * amount * 1.001;
      const bool right =
          Tested().adds_in_rank_order ? data[i] == in_order : std::abs(data[i] - exact) <= bound;
      if (!right)
        return absl::DataLossError(
            absl::StrCat("element ", i, " is ", data[i], ", expected ", exact));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// An infinite or undefined gradient must reach every rank, or nobody skips the step.
TEST_P(ReductionTest, PassesInfinitiesAndNaNsOn) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    const int last = comm.world_size() - 1;
    for (ReduceOp op :
         {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      std::vector<float> data(100, 1.0f);
      if (comm.rank() == last) data[3] = NAN;
      if (comm.rank() == 0) data[4] = INFINITY;
      EK_ASSIGN_OR_RETURN(Placed<float> placed, Place(comm, data));
      EK_RETURN_IF_ERROR(comm.AllReduce(placed.view(), op));
      EK_RETURN_IF_ERROR(placed.Fetch());
      if (Tested().min_and_max_pass_nan_on || (op != ReduceOp::kMin && op != ReduceOp::kMax)) {
        EXPECT_TRUE(std::isnan(data[3])) << ToString(op) << " gave " << data[3];
      }
      EXPECT_EQ(data[4], op == ReduceOp::kMin && last > 0 ? 1.0f : INFINITY) << ToString(op);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(WorldSize, ReductionTest, testing::ValuesIn(WorldSizes()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace evenkeel
