// The collectives whose sizes differ between the ranks.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/tests/conformance/placed.h"
#include "evenkeel/tests/conformance/reference.h"
#include "evenkeel/tests/conformance/tested_backend.h"
#include "evenkeel/tests/conformance/world_test.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr CollectiveKind kKinds[] = {CollectiveKind::kAllGatherV, CollectiveKind::kAllToAllV};

bool IsSupported(Communicator& comm) {
  return comm.Supports({.kind = CollectiveKind::kAllGatherV}).ok();
}

// The numbers of elements from one rank to another: all are empty; one part is; all are small; some
// are larger than a transport moves at once; a few ranks have much and the others nothing; a rank
// keeps nearly all.
enum class Sizes { kNone, kSomeNone, kSmall, kLarge, kOneSided, kMostlyOwn };
constexpr Sizes kSizes[] = {Sizes::kNone,  Sizes::kSomeNone, Sizes::kSmall,
                            Sizes::kLarge, Sizes::kOneSided, Sizes::kMostlyOwn};

int64_t SizeOf(Sizes sizes, int from, int to) {
  const int64_t seed = from * 7 + to * 3;
  switch (sizes) {
    case Sizes::kNone:
      return 0;
    case Sizes::kSomeNone:
      return (from + to) % 2 == 0 ? 0 : 1 + seed % 40;
    case Sizes::kSmall:
      return 1 + seed * 11 % 500;
    case Sizes::kLarge:
      return seed % 3 == 0 ? 70'001 + seed : 1 + seed;
    case Sizes::kOneSided:
      return from == 0 && to != 0 ? 100'003 : 0;
    case Sizes::kMostlyOwn:
      return from == 0 && to == 0 ? 70'001 : 1 + seed;
  }
  return 0;
}

// Returns a part of one random vector, which all parts share; each pair of ranks has its own
// offset.
template <typename T>
std::vector<T> Part(int from, int to, int64_t n) {
  constexpr int kApart = 997;
  static const std::vector<T>& all =
      *new std::vector<T>(Inputs<T>(ReduceOp::kMax, 0, 64 * kApart + 100'003));
  const auto begin = all.begin() + (from * 8 + to) * kApart;
  return std::vector<T>(begin, begin + n);
}

// The elements of an all_gather_v go to all ranks, as those that an all_to_all_v has for rank 1.
int Receiver(CollectiveKind kind, int rank) {
  return kind == CollectiveKind::kAllGatherV ? 1 : rank;
}

// Views of consecutive parts with these sizes.
std::vector<TensorView> Cut(const TensorView& whole, const std::vector<int64_t>& sizes) {
  std::vector<TensorView> parts;
  int64_t at = 0;
  for (int64_t size : sizes) {
    parts.push_back(whole.Slice(at, size));
    at += size;
  }
  return parts;
}

Work Issue(Channel& channel, CollectiveKind kind, const std::vector<TensorView>& in,
           const std::vector<TensorView>& out) {
  return kind == CollectiveKind::kAllGatherV ? channel.AllGather(in[0], out)
                                             : channel.AllToAll(in, out);
}

// A rank's buffers for one collective, and its result.
template <typename T>
class Exchange {
 public:
  Exchange(Communicator& comm, CollectiveKind kind, Sizes sizes) : comm_(comm), kind_(kind) {
    const int inputs = kind == CollectiveKind::kAllGatherV ? 1 : comm.world_size();
    for (int to = 0; to < inputs; ++to) {
      const int receiver = Receiver(kind, to);
      in_sizes_.push_back(SizeOf(sizes, comm.rank(), receiver));
      const std::vector<T> part = Part<T>(comm.rank(), receiver, in_sizes_.back());
      input_.insert(input_.end(), part.begin(), part.end());
    }
    for (int from = 0; from < comm.world_size(); ++from)
      out_sizes_.push_back(SizeOf(sizes, from, Receiver(kind, comm.rank())));
    output_.resize(std::accumulate(out_sizes_.begin(), out_sizes_.end(), int64_t{0}));
  }

  absl::Status Begin(Channel& channel) {
    EK_ASSIGN_OR_RETURN(in_, Place(comm_, input_));
    EK_ASSIGN_OR_RETURN(out_, Place(comm_, output_));
    work_ = Issue(channel, kind_, Cut(in_.view(), in_sizes_), Cut(out_.view(), out_sizes_));
    return absl::OkStatus();
  }
  absl::Status WaitAndCheck() {
    EK_RETURN_IF_ERROR(work_.Wait());
    EK_RETURN_IF_ERROR(out_.Fetch());
    std::vector<T> expected;
    for (int from = 0; from < comm_.world_size(); ++from) {
      const std::vector<T> part = Part<T>(from, Receiver(kind_, comm_.rank()), out_sizes_[from]);
      expected.insert(expected.end(), part.begin(), part.end());
    }
    return ExpectEqual(ToString(kind_), output_, expected);
  }

 private:
  Communicator& comm_;
  const CollectiveKind kind_;
  std::vector<int64_t> in_sizes_, out_sizes_;
  std::vector<T> input_, output_;
  Placed<T> in_, out_;
  Work work_;
};

class UnevenTest : public WorldTest {};  // World size.

TEST_P(UnevenTest, EachRankReceivesWhatTheOthersHaveForIt) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    if (!IsSupported(comm)) return absl::OkStatus();
    return ForEachType([&](auto type) -> absl::Status {
      for (CollectiveKind kind : kKinds) {
        for (Sizes sizes : kSizes) {
          Exchange<typename decltype(type)::type> exchange(comm, kind, sizes);
          EK_RETURN_IF_ERROR(exchange.Begin(comm.user()));
          EK_RETURN_IF_ERROR(exchange.WaitAndCheck());
        }
      }
      return absl::OkStatus();
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(UnevenTest, ManyAreInFlightBesideOthers) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    if (!IsSupported(comm)) return absl::OkStatus();
    std::vector<Exchange<int32_t>> exchanges;
    for (int i = 0; i < 40; ++i)
      exchanges.emplace_back(comm, kKinds[i % 2], kSizes[i % std::size(kSizes)]);
    std::vector<int64_t> ones(3, 1);
    std::vector<Work> sums;
    for (Exchange<int32_t>& exchange : exchanges) {
      EK_RETURN_IF_ERROR(exchange.Begin(comm.user()));
      sums.push_back(comm.user().AllReduce(absl::MakeSpan(ones), ReduceOp::kMax));
    }
    for (Exchange<int32_t>& exchange : exchanges) EK_RETURN_IF_ERROR(exchange.WaitAndCheck());
    for (const Work& sum : sums) EK_RETURN_IF_ERROR(sum.Wait());
    EXPECT_EQ(ones[2], 1);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(UnevenTest, MegabytesGoThrough) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    if (!IsSupported(comm)) return absl::OkStatus();
    const int w = comm.world_size();
    const auto size = [&](int from, int to) -> int64_t {
      return 1'000'003 + from * 1001 + (to == 0 ? 2'000'000 : to);
    };
    for (CollectiveKind kind : kKinds) {
      std::vector<int64_t> in_sizes, out_sizes;
      for (int rank = 0; rank < w; ++rank) {
        in_sizes.push_back(size(comm.rank(), Receiver(kind, rank)));
        out_sizes.push_back(size(rank, Receiver(kind, comm.rank())));
      }
      if (kind == CollectiveKind::kAllGatherV) in_sizes.resize(1);
      std::vector<uint8_t> input, output;
      for (size_t to = 0; to < in_sizes.size(); ++to)
        input.insert(input.end(), in_sizes[to], comm.rank() * 16 + Receiver(kind, to));
      output.resize(std::accumulate(out_sizes.begin(), out_sizes.end(), int64_t{0}));
      const std::vector<TensorView> in = Cut(absl::MakeSpan(input), in_sizes);
      const std::vector<TensorView> out = Cut(absl::MakeSpan(output), out_sizes);
      EK_RETURN_IF_ERROR(Issue(comm.user(), kind, in, out).Wait());
      for (int from = 0; from < w; ++from) {
        const uint8_t expected = from * 16 + Receiver(kind, comm.rank());
        const auto part = out[from].as<uint8_t>();
        EXPECT_EQ(std::count(part.begin(), part.end(), expected), out_sizes[from])
            << ToString(kind) << " from " << from;
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(UnevenTest, OutputsMayOverlapInputs) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    if (!IsSupported(comm)) return absl::OkStatus();
    const int w = comm.world_size();
    constexpr int64_t kEach = 100'000;
    // In place, then with an input that lies in the others' outputs.
    for (int shift = 0; shift < std::min(w, 2); ++shift) {
      std::vector<int32_t> data(kEach * w, -1);
      const TensorView whole(absl::MakeSpan(data));
      const std::vector<TensorView> parts = Cut(whole, std::vector<int64_t>(w, kEach));
      const TensorView mine = parts[(comm.rank() + shift) % w];
      std::fill_n(static_cast<int32_t*>(mine.data), kEach, comm.rank());
      EK_RETURN_IF_ERROR(comm.user().AllGather(mine, parts).Wait());
      for (int rank = 0; rank < w; ++rank) EXPECT_EQ(data[rank * kEach + 7], rank) << shift;
    }
    std::vector<int32_t> data;
    for (int to = 0; to < w; ++to) data.insert(data.end(), kEach, comm.rank() * 10 + to);
    const std::vector<TensorView> parts = Cut(absl::MakeSpan(data), std::vector<int64_t>(w, kEach));
    EK_RETURN_IF_ERROR(comm.user().AllToAll(parts, parts).Wait());
    for (int from = 0; from < w; ++from) EXPECT_EQ(data[from * kEach + 7], from * 10 + comm.rank());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(UnevenTest, AWrongCallIsRefusedAndTheChannelGoesOn) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    const absl::StatusCode refused = absl::StatusCode::kInvalidArgument;
    const size_t w = comm.world_size();
    std::vector<float> a(12), b(12);
    EK_ASSIGN_OR_RETURN(Placed<float> placed, Place(comm, a));
    const TensorView data = placed.view();
    const std::vector<TensorView> ones(w, data.Slice(0, 1));
    const std::vector<TensorView> more(w + 1, data.Slice(0, 1));
    std::vector<TensorView> mixed = ones;
    mixed.back().dtype = DType::kInt32;
    std::vector<TensorView> other_own = ones;
    other_own[comm.rank()] = data.Slice(0, 2);
    Channel& user = comm.user();
    EXPECT_EQ(user.AllGather(data.Slice(0, 1), more).Wait().code(), refused);
    EXPECT_EQ(user.AllGather(data.Slice(0, 1), mixed).Wait().code(), refused);
    EXPECT_EQ(user.AllGather(data.Slice(0, 2), ones).Wait().code(), refused);
    EXPECT_EQ(user.AllToAll(more, ones).Wait().code(), refused);
    EXPECT_EQ(user.AllToAll(ones, more).Wait().code(), refused);
    EXPECT_EQ(user.AllToAll(mixed, ones).Wait().code(), refused);
    EXPECT_EQ(user.AllToAll(other_own, ones).Wait().code(), refused);
    const Collective counted = {.kind = CollectiveKind::kAllGatherV, .count = 1};
    EXPECT_EQ(user.Issue(counted, {data.Slice(0, 1)}, {ones.begin(), ones.end()}).Wait().code(),
              refused);
    if (!IsSupported(comm)) {
      EXPECT_EQ(user.AllToAll(ones, ones).Wait().code(), absl::StatusCode::kUnimplemented);
    }
    EXPECT_EQ(user.position(), 0);
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(WorldSize, UnevenTest, testing::ValuesIn(WorldSizes()),
                         testing::PrintToStringParamName());

class UnevenSizesTest : public WorldTest {};  // World size.

TEST_P(UnevenSizesTest, ThatDifferBetweenTwoRanksEndTheGroupOnEveryRank) {
  // Sent, expected.
  const std::pair<int64_t, int64_t> cases[] = {
      {3, 4}, {4, 3}, {0, 5}, {5, 0}, {0, 200'000}, {200'000, 0}, {200'000, 199'999}};
  const int last = GetParam() - 1;
  for (CollectiveKind kind : kKinds) {
    for (const auto& [sent, expected] : cases) {
      SCOPED_TRACE(absl::StrCat(ToString(kind), ", ", sent, " and ", expected));
      const auto body = [&](Communicator& comm) -> absl::Status {
        if (!IsSupported(comm)) return absl::UnimplementedError("");
        // Behind the buffers lies memory that must stay as it is.
        std::vector<float> input(250'000, 1.0f), output(500'000, -1.0f);
        std::vector<int64_t> in_sizes(kind == CollectiveKind::kAllGatherV ? 1 : GetParam(), 2);
        std::vector<int64_t> out_sizes(GetParam(), 2);
        if (comm.rank() == 0) in_sizes.back() = sent;
        if (comm.rank() == last) out_sizes[0] = expected;
        if (kind == CollectiveKind::kAllGatherV && comm.rank() != last) out_sizes[0] = sent;
        const int64_t end = std::accumulate(out_sizes.begin(), out_sizes.end(), int64_t{0});
        EK_RETURN_IF_ERROR(comm.Barrier());
        const absl::Time start = absl::Now();
        absl::Status ended = Issue(comm.user(), kind, Cut(absl::MakeSpan(input), in_sizes),
                                   Cut(absl::MakeSpan(output), out_sizes))
                                 .Wait();
        if (ended.ok()) ended = comm.Barrier();
        EXPECT_LT(absl::Now() - start, kAtOnce) << "not at a deadline, which is later";
        EXPECT_TRUE(absl::IsFailedPrecondition(ended)) << comm.rank() << ": " << ended;
        const absl::string_view values = ended.message();
        std::vector<std::string> parts = {absl::StrCat("rank ", last), "disagree"};
        // Over several hosts it may be one of the steps into which the operation is divided.
        if (!absl::StartsWith(Tested().name, "hierarchical")) {
          parts.push_back("rank 0");
          parts.push_back(std::string(ToString(kind)));
        }
        for (const std::string& part : parts)
          EXPECT_TRUE(absl::StrContains(values, part)) << part << " in: " << ended;
        const auto info = FailureInfoOf(ended);
        EXPECT_TRUE(info.has_value() && info->kind == FailureKind::kDisagreement) << ended;
        EXPECT_EQ(std::count(output.begin() + end, output.end(), -1.0f),
                  static_cast<int64_t>(output.size()) - end);
        return ended;
      };
      const absl::Status status = RunTested(
          GetParam(), body, {.timeout = kPatience, .watch = {.beat = absl::Milliseconds(50)}});
      EXPECT_FALSE(status.ok());
    }
  }
}

TEST_P(UnevenSizesTest, AnotherTypeOrKindEndsTheGroupOnEveryRank) {
  for (const bool is_kind : {false, true}) {
    const auto body = [&](Communicator& comm) -> absl::Status {
      if (!IsSupported(comm)) return absl::UnimplementedError("");
      std::vector<float> data(2 * GetParam());
      TensorView whole(absl::MakeSpan(data));
      if (comm.rank() == 1 && !is_kind) whole.dtype = DType::kInt32;
      const std::vector<TensorView> parts = Cut(whole, std::vector<int64_t>(GetParam(), 2));
      absl::Status ended = comm.rank() == 1 && is_kind
                               ? comm.user().AllGather(parts[1], parts).Wait()
                               : comm.user().AllToAll(parts, parts).Wait();
      EXPECT_TRUE(absl::IsFailedPrecondition(ended)) << ended;
      EXPECT_TRUE(absl::StrContains(ended.message(), "disagree")) << ended;
      return ended;
    };
    EXPECT_FALSE(RunTested(GetParam(), body,
                           {.timeout = kPatience, .watch = {.beat = absl::Milliseconds(50)}})
                     .ok());
  }
}

INSTANTIATE_TEST_SUITE_P(WorldSize, UnevenSizesTest, testing::ValuesIn(WorldSizes(2, 5)),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace evenkeel
