#include "evenkeel/tools/bench/case.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"

namespace evenkeel::bench {

std::string NameOf(Op op) { return op == Op::kSend ? "send_recv" : std::string(ToString(op)); }

int64_t WholeBytes(const Case& what) {
  if (what.op == Op::kBarrier) return 0;
  const int64_t step = static_cast<int64_t>(sizeof(float)) * (what.has_parts() ? what.world : 1);
  return std::max(step, what.bytes / step * step);
}

int Value(int rank, int64_t i) {
  uint32_t mixed =
      static_cast<uint32_t>(i) * 0x9E3779B1u + static_cast<uint32_t>(rank) * 0x7FEB352Du;
  mixed ^= mixed >> 15;
  mixed *= 0x846CA68Bu;
  return static_cast<int>(mixed >> 13 & 3);
}

int Expected(const Case& what, int rank, int64_t i) {
  const auto sum = [&](int64_t at) {
    int total = 0;
    for (int each = 0; each < what.world; ++each) total += Value(each, at);
    return total;
  };
  const int64_t part = what.part();
  switch (what.op) {
    case Op::kReduceScatter:
      return sum(rank * part + i);
    case Op::kAllGather:
      return Value(static_cast<int>(i / part), i % part);
    case Op::kAllToAll:
      return Value(static_cast<int>(i / part), rank * part + i % part);
    case Op::kBroadcast:
      return Value(kRoot, i);
    case Op::kSend:
      return Value((rank + what.world - 1) % what.world, i);
    default:
      return sum(i);
  }
}

void Fill(const Case& what, int rank, float* in, float* out) {
  if (IsInPlace(what.op)) in = out;
  if (in != out) std::fill_n(out, what.out_count(), std::numeric_limits<float>::quiet_NaN());
  const int64_t count = in == out ? what.out_count() : what.in_count();
  for (int64_t i = 0; i < count; ++i) in[i] = static_cast<float>(Value(rank, i));
}

std::string FindWrong(const Case& what, int rank, const float* out) {
  if (what.op == Op::kReduce && rank != kRoot) return "";  // Unspecified.
  for (int64_t i = 0; i < what.out_count(); ++i) {
    const int expected = Expected(what, rank, i);
    if (out[i] == static_cast<float>(expected)) continue;
    return absl::StrCat("element ", i, " of ", what.out_count(), " is ", out[i], " instead of ",
                        expected);
  }
  return "";
}

}  // namespace evenkeel::bench
