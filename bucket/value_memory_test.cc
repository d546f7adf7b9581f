#include "evenkeel/bucket/value_memory.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/local.h"
#include "evenkeel/comm/shm.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {
namespace {

bool IsIn(const Memory& memory, const TensorView& value) {
  const auto* const begin = static_cast<const std::byte*>(memory.data.get());
  const auto* const data = static_cast<const std::byte*>(value.data);
  return data >= begin && data + value.bytes() <= begin + memory.bytes;
}

TEST(ValueMemoryTest, ValuesLieInOneBlockOfTheTransport) {
  for (const bool is_shm : {false, true}) {
    auto group = is_shm ? CreateShmGroupInProcess(1, {}) : CreateLocalGroup(1, {});
    ASSERT_TRUE(group.ok()) << group.status();
    std::vector<float> a(5000, 1.5f), b(3, 2.5f), none;
    std::vector<double> c(70, 3.5), ignored(9, 4.5);
    std::vector<float> gradient(5000);
    ParameterSet params;
    params.Add("a", absl::MakeSpan(a), absl::MakeSpan(gradient));
    params.Add("b", absl::MakeSpan(b));
    params.Add("none", absl::MakeSpan(none));
    params.Add("c", absl::MakeSpan(c));
    params.Add("a again", absl::MakeSpan(a));
    const int other = params.Add("ignored", absl::MakeSpan(ignored));
    ASSERT_TRUE(params.Ignore(other).ok());

    const absl::StatusOr<Memory> memory = MoveValues(*group->front(), params);
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_EQ(params.size(), 5);
    for (const char* name : {"a", "b", "c", "a again"}) {
      const TensorView& value = params[params.Find(name)].value;
      EXPECT_TRUE(IsIn(*memory, value)) << name;
      EXPECT_EQ(reinterpret_cast<uintptr_t>(value.data) % 64, 0u) << name;
    }
    EXPECT_EQ(params[other].value.data, ignored.data());
    EXPECT_EQ(params[0].grad.data, gradient.data());
    EXPECT_TRUE(params.Validate().ok()) << params.Validate();
    for (const float value : params[0].value.as<float>()) ASSERT_EQ(value, 1.5f);
    for (const float value : params[params.Find("b")].value.as<float>()) EXPECT_EQ(value, 2.5f);
    for (const double value : params[params.Find("c")].value.as<double>()) EXPECT_EQ(value, 3.5);
    // What is shared is found at its new place, and no longer at its old one.
    EXPECT_EQ(params.Add("a once more", params[0].value), 0);
    EXPECT_EQ(params.Add("another", absl::MakeSpan(a)), 5);

    group->clear();  // The values outlive it.
    params[0].value.as<float>()[4999] = 7;
    EXPECT_EQ(params[0].value.as<float>()[4999], 7);
  }
}

TEST(ValueMemoryTest, NothingToMoveIsNoError) {
  auto group = *CreateLocalGroup(1, {});
  ParameterSet params;
  const absl::StatusOr<Memory> memory = MoveValues(*group.front(), params);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->bytes, 0);
}

}  // namespace
}  // namespace evenkeel
