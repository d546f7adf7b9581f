#include "evenkeel/zero_optim/internal/placement/slice_recovery.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr int kMostRanks = 1 << 20;

// A division of `size` elements among those that hold state of that step; none if some is missing.
std::optional<Holders> Cover(const std::vector<SliceFacts>& by_rank, size_t param, int64_t step,
                             int64_t size) {
  Holders holders;
  int64_t next = 0;
  while (next < size) {
    HeldRange best{.begin = next, .end = next};
    for (size_t rank = 0; rank < by_rank.size(); ++rank) {
      const SliceFacts::Held& held = by_rank[rank].held[param];
      if (held.step != step || held.begin > next || held.begin + held.count <= best.end) continue;
      best.end = held.begin + held.count;
      best.rank = static_cast<int>(rank);
    }
    if (best.end == next) return std::nullopt;
    holders.push_back(best);
    next = best.end;
  }
  return holders;
}

// Returns the ranks of the old group that are missing.
std::vector<int> Missing(const std::vector<SliceFacts>& by_rank) {
  std::set<int> missing;
  for (int rank = 0; rank < by_rank[0].old_world_size; ++rank) missing.insert(rank);
  for (const SliceFacts& facts : by_rank) missing.erase(facts.old_rank);
  return {missing.begin(), missing.end()};
}

}  // namespace

std::string SliceFacts::Serialize() const {
  ByteWriter writer;
  standing.Write(writer);
  writer.I32(old_rank).I32(old_world_size);
  for (const Held& h : held) writer.I64(h.step).I64(h.begin).I64(h.count);
  return writer.Take();
}

absl::StatusOr<SliceFacts> SliceFacts::Parse(absl::string_view bytes,
                                             const std::vector<int64_t>& sizes) {
  ByteReader reader(bytes);
  SliceFacts facts;
  facts.standing = Standing::Read(reader);
  facts.old_rank = reader.I32();
  facts.old_world_size = reader.I32();
  if (facts.old_rank < 0 || facts.old_rank >= facts.old_world_size ||
      facts.old_world_size > kMostRanks)
    reader.Refuse();
  for (size_t param = 0; param < sizes.size() && reader.ok(); ++param) {
    Held held;
    held.step = reader.I64();
    held.begin = reader.I64();
    held.count = reader.I64();
    const int64_t size = sizes[param];
    if (held.step < 0 || held.begin < 0 || held.count < 0 || held.begin > size ||
        held.count > size - held.begin) {
      reader.Refuse();
    }
    facts.held.push_back(held);
  }
  EK_RETURN_IF_ERROR(reader.Finish("the message of a rank about its slices"));
  return facts;
}

absl::StatusOr<SliceStart> PlanSliceStart(const std::vector<SliceFacts>& by_rank,
                                          const std::vector<int64_t>& sizes) {
  std::vector<Standing> standings;
  bool may_lose = true, is_complete = true;
  for (const SliceFacts& facts : by_rank) {
    standings.push_back(facts.standing);
    may_lose = may_lose && facts.standing.may_lose;
  }
  SliceStart start;
  for (size_t param = 0; param < sizes.size(); ++param) {
    std::set<int64_t, std::greater<>> steps;  // The newest first.
    for (const SliceFacts& facts : by_rank) steps.insert(facts.held[param].step);
    start.steps.push_back(0);
    start.holders.emplace_back();
    for (int64_t step : steps) {
      if (step == 0) break;
      std::optional<Holders> holders = Cover(by_rank, param, step, sizes[param]);
      if (!holders.has_value()) continue;
      start.steps.back() = step;
      start.holders.back() = *std::move(holders);
      break;
    }
    if (start.steps.back() == 0 && *steps.begin() > 0) is_complete = false;
  }
  if (may_lose) return start;
  if (!is_complete && !Missing(by_rank).empty()) return LostStateError(Missing(by_rank), standings);
  EK_RETURN_IF_ERROR(CheckSameStep(standings));
  if (!is_complete) return absl::InternalError("no rank has a part of the optimizer's state");
  return start;
}

}  // namespace evenkeel::internal
