#include "evenkeel/bucket/divergence.h"

#include <cstdint>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

struct Model {
  Model() : memory(40) {
    for (int i = 0; i < 8; ++i) {
      params.Add(absl::StrCat("p", i), TensorView(absl::MakeSpan(memory).subspan(5 * i, 5)));
    }
  }
  float& element(int param, int k) { return memory[5 * param + k]; }
  std::vector<float> memory;
  ParameterSet params;
};

void RunGroup(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body) {
  const absl::Status status = RunTestRanks(world_size, body);
  EXPECT_TRUE(status.ok()) << status;
}

TEST(FindDivergenceTest, NamesTheFirstTensorAndTheRanksThatDifferFromMost) {
  for (int world_size : {2, 3, 5, 8}) {
    RunGroup(world_size, [&](Communicator& comm) -> absl::Status {
      Model model;
      EK_ASSIGN_OR_RETURN(std::optional<Divergence> found, FindDivergence(model.params, comm));
      EXPECT_FALSE(found.has_value());

      const int odd_one = world_size - 1;
      if (comm.rank() == odd_one) model.element(6, 4) = 1e-30f;
      EK_ASSIGN_OR_RETURN(found, FindDivergence(model.params, comm));
      EXPECT_EQ(ToString(*found),
                world_size == 2 ? "\"p6\" (tensor 6): ranks 0 and 1 differ"
                                : absl::StrCat("\"p6\" (tensor 6) differs on rank ", odd_one));

      // Rank 0 is the odd one out of most; of two, either may be.
      if (comm.rank() == 0) model.element(3, 0) = -0.0f;
      EK_ASSIGN_OR_RETURN(found, FindDivergence(model.params, comm));
      EXPECT_EQ(found->tensor, "p3");
      if (world_size == 2) {
        EXPECT_THAT(found->ranks, ElementsAre(0, 1));
      } else {
        EXPECT_THAT(found->ranks, ElementsAre(0));
      }
      EXPECT_EQ(found->is_split, world_size == 2);
      EXPECT_EQ(found->tensors, 2);
      EXPECT_THAT(ToString(*found), HasSubstr(", and 1 more tensors differ"));
      return absl::OkStatus();
    });
  }
}

TEST(HashOfTest, DependsOnEachByteAndOnTheirOrder) {
  for (const int64_t size : {0, 1, 7, 8, 31, 32, 33, 100}) {
    std::vector<int8_t> bytes(size);
    for (int64_t i = 0; i < size; ++i) bytes[i] = static_cast<int8_t>(i);
    const auto hash = [&] { return HashOf(TensorView(bytes.data(), size, DType::kInt8)); };
    std::set<uint64_t> hashes = {hash()};
    for (int64_t i = 0; i < size; ++i) {
      bytes[i] ^= 0x40;
      hashes.insert(hash());
      bytes[i] ^= 0x40;
    }
    for (int64_t i = 0; i + 1 < size; ++i) {
      std::swap(bytes[i], bytes[i + 1]);
      hashes.insert(hash());
      std::swap(bytes[i], bytes[i + 1]);
    }
    EXPECT_EQ(static_cast<int64_t>(hashes.size()), size == 0 ? 1 : 2 * size) << size;
  }
}

TEST(FindDivergenceTest, NamesAllRanksIfNoValueIsTheMostFrequent) {
  RunGroup(4, [&](Communicator& comm) -> absl::Status {
    Model model;
    model.element(1, 0) = static_cast<float>(comm.rank() % 2);
    EK_ASSIGN_OR_RETURN(std::optional<Divergence> found, FindDivergence(model.params, comm));
    EXPECT_EQ(ToString(*found), "\"p1\" (tensor 1): ranks 0, 1, 2, 3 differ");
    model.element(1, 0) = comm.rank() == 2 ? 7 : static_cast<float>(comm.rank() / 3);
    EK_ASSIGN_OR_RETURN(found, FindDivergence(model.params, comm));
    EXPECT_EQ(ToString(*found), "\"p1\" (tensor 1) differs on ranks 2,3");
    return absl::OkStatus();
  });
}

TEST(FindDivergenceTest, IgnoredParametersMayDiffer) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    Model model;
    EK_RETURN_IF_ERROR(model.params.Ignore(3));
    model.element(3, 1) = static_cast<float>(comm.rank());
    EK_ASSIGN_OR_RETURN(const std::optional<Divergence> found, FindDivergence(model.params, comm));
    EXPECT_FALSE(found.has_value());
    return absl::OkStatus();
  });
}

TEST(FindDivergenceTest, SeesEveryTensorOnceInAllParts) {
  RunGroup(3, [&](Communicator& comm) -> absl::Status {
    Model model;
    if (comm.rank() == 1) model.element(5, 2) = 1;
    for (const int64_t parts : {1, 2, 3, 7, 8, 20}) {
      int found = 0;
      for (int64_t step = 100; step < 100 + parts; ++step) {
        EK_ASSIGN_OR_RETURN(const std::optional<Divergence> divergence,
                            FindDivergence(model.params, comm, {.part = step, .parts = parts}));
        found += divergence.has_value();
        EXPECT_EQ(divergence.has_value(), step % parts == 5 % parts);
        EXPECT_EQ(divergence.value_or(Divergence{.index = 5}).index, 5);
      }
      EXPECT_EQ(found, 1);
    }
    return absl::OkStatus();
  });
}

TEST(FindDivergenceTest, RefusesDifferentListsAndPartsThatAreNone) {
  RunGroup(2, [&](Communicator& comm) -> absl::Status {
    Model model;
    EXPECT_TRUE(absl::IsInvalidArgument(FindDivergence(model.params, comm, {.parts = 0}).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(
        FindDivergence(model.params, comm, {.part = -1, .parts = 2}).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(
        FindDivergence(model.params, comm, {.part = comm.rank(), .parts = 2}).status()));
    const NamedView one = {comm.rank() == 0 ? "a" : "b", model.params[0].value};
    EXPECT_TRUE(absl::IsInvalidArgument(FindDivergence({one}, comm).status()));
    NamedView elsewhere = one;
    elsewhere.view.device = Device::Cuda(0);
    EXPECT_TRUE(absl::IsInvalidArgument(FindDivergence({elsewhere}, comm).status()));
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace evenkeel
