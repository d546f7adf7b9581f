#include "evenkeel/zero_optim/internal/placement/shard_move.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/partition.h"

namespace evenkeel::internal {
namespace {

// One that has taken part in the steps; a rank that is new has a plan of its own.
bool OwnerIsHere(const std::vector<ShardFacts>& by_rank, size_t param, int owner) {
  return std::any_of(by_rank.begin(), by_rank.end(), [&](const ShardFacts& facts) {
    return facts.old_rank == owner && facts.owners[param] == owner && facts.was_updated[param] != 0;
  });
}

absl::Status CheckNothingIsLost(const std::vector<ShardFacts>& by_rank,
                                const std::vector<Standing>& standings,
                                const std::vector<int>& holder) {
  std::set<int> lost;  // Their ranks in the old group.
  for (const ShardFacts& facts : by_rank) {
    for (size_t param = 0; param < holder.size(); ++param) {
      if (facts.was_updated[param] && holder[param] < 0 &&
          !OwnerIsHere(by_rank, param, facts.owners[param])) {
        lost.insert(facts.owners[param]);
      }
    }
  }
  if (lost.empty()) return absl::OkStatus();
  return LostStateError({lost.begin(), lost.end()}, standings);
}

}  // namespace

std::string ShardFacts::Serialize() const {
  ByteWriter writer;
  standing.Write(writer);
  writer.U64(generation).Bytes(mask.Serialize()).I32(old_rank);
  for (size_t param = 0; param < owners.size(); ++param) {
    writer.I32(owners[param]).Bool(was_updated[param] != 0).I64(held_steps[param]);
  }
  return writer.Take();
}

absl::StatusOr<ShardFacts> ShardFacts::Parse(absl::string_view bytes, int param_count) {
  ByteReader reader(bytes);
  ShardFacts facts;
  facts.standing = Standing::Read(reader);
  facts.generation = reader.U64();
  const absl::string_view mask_bytes = reader.Bytes();
  facts.old_rank = reader.I32();
  for (int param = 0; param < param_count && reader.ok(); ++param) {
    facts.owners.push_back(reader.I32());
    facts.was_updated.push_back(reader.Bool());
    facts.held_steps.push_back(reader.I64());
    if (facts.owners.back() < kNoOwner || facts.held_steps.back() < 0) reader.Refuse();
  }
  EK_RETURN_IF_ERROR(reader.Finish("the message of a rank about its shard"));
  EK_ASSIGN_OR_RETURN(facts.mask, TrainableMask::Parse(mask_bytes));
  if (facts.mask.size() != param_count)
    return absl::InvalidArgumentError("a shard's mask is malformed");
  return facts;
}

absl::StatusOr<ShardMove> PlanShardMove(const std::vector<ShardFacts>& by_rank, int plan_from) {
  const size_t params = by_rank[0].owners.size();
  size_t chosen = plan_from < 0 ? 0 : static_cast<size_t>(plan_from);
  if (chosen >= by_rank.size())
    return absl::InternalError(
        absl::StrCat("rank ", plan_from, " cannot give the plan: it does not exist"));
  ShardMove move{.holder = std::vector<int>(params, -1), .steps = std::vector<int64_t>(params, 0)};
  std::vector<Standing> standings;
  bool may_lose = true;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const ShardFacts& facts = by_rank[rank];
    if (plan_from < 0 && facts.generation > by_rank[chosen].generation) chosen = rank;
    move.generation = std::max(move.generation, facts.generation + 1);
    standings.push_back(facts.standing);
    may_lose = may_lose && facts.standing.may_lose;
    for (size_t param = 0; param < params; ++param) {
      if (facts.held_steps[param] <= move.steps[param]) continue;
      move.holder[param] = static_cast<int>(rank);
      move.steps[param] = facts.held_steps[param];
    }
  }
  const ShardFacts& plan = by_rank[chosen];
  move.mask = plan.mask;
  if (!may_lose) {
    EK_RETURN_IF_ERROR(CheckNothingIsLost(by_rank, standings, move.holder));
    EK_RETURN_IF_ERROR(CheckSameStep(standings));
  }
  for (size_t param = 0; param < params; ++param) {
    if (plan.owners[param] != kNoOwner || move.holder[param] >= 0 ||
        plan.mask[static_cast<int>(param)]) {
      move.owned.push_back(static_cast<int>(param));
    }
  }
  return move;
}

}  // namespace evenkeel::internal
