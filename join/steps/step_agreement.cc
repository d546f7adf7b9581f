#include "evenkeel/join/steps/step_agreement.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/steps/step_ledger.h"

namespace evenkeel {
namespace {

using internal::RankList;

// One field of a participant's state: its comparison, and its text for messages.
struct Aspect {
  absl::string_view what;
  bool (*differs)(const ParticipantState&, const ParticipantState&);
  std::string (*value)(const ParticipantState&);
};
using State = const ParticipantState&;

const Aspect kAspects[] = {
    {"synchronising", [](State a, State b) { return a.sync != b.sync; },
     [](State s) -> std::string { return s.sync ? "synchronises" : "accumulates"; }},
    {"the set of trained parameters", [](State a, State b) { return a.mask_hash != b.mask_hash; },
     [](State s) {
       return absl::StrCat(s.note.empty() ? "nothing frozen" : s.note, " (mask ",
                           absl::Hex(s.mask_hash), ")");
     }},
    {"the plan generation", [](State a, State b) { return a.generation != b.generation; },
     [](State s) { return absl::StrCat("generation ", s.generation); }},
    {"the schedule", [](State a, State b) { return a.schedule_hash != b.schedule_hash; },
     [](State s) { return absl::StrCat("schedule ", absl::Hex(s.schedule_hash)); }},
};

// "<before>ranks 0,2: synchronises; rank 1: accumulates". The fewest ranks are named as the cause.
absl::Status Disagree(absl::string_view before,
                      const std::map<std::string, std::vector<int>>& ranks_by_value) {
  std::vector<std::pair<int, std::string>> parts;  // By their first rank.
  for (const auto& [value, ranks] : ranks_by_value) {
    parts.emplace_back(ranks[0], absl::StrCat(RankList(ranks), ": ", value));
  }
  std::sort(parts.begin(), parts.end());
  const auto fewest = std::min_element(
      ranks_by_value.begin(), ranks_by_value.end(), [](const auto& a, const auto& b) {
        return std::pair(a.second.size(), a.second) < std::pair(b.second.size(), b.second);
      });
  return WithFailureInfo(
      absl::FailedPreconditionError(absl::StrCat(
          before, absl::StrJoin(parts, "; ",
                                [](std::string* out, const auto& part) { *out += part.second; }))),
      {.kind = FailureKind::kDisagreement, .ranks = fewest->second});
}

// Texts are only made for an error: thousands of ranks compare thousands of records in each step.
absl::Status CompareJoins(int64_t step, const std::vector<StepRecord>& records) {
  const auto has_first_scope = [&](const StepRecord& record) {
    return record.scope_hash == records[0].scope_hash;
  };
  if (std::ranges::all_of(records, has_first_scope)) return absl::OkStatus();
  std::map<std::string, std::vector<int>> ranks_by_scope;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    const uint64_t scope = records[rank].scope_hash;
    ranks_by_scope[scope == 0 ? "no join" : absl::StrCat("join ", absl::Hex(scope))].push_back(
        static_cast<int>(rank));
  }
  return Disagree(
      absl::StrCat("step ", step, ": the ranks run different joins (objects or options): "),
      ranks_by_scope);
}

// Compares the joins of all ranks and the states of the active ones. The ranks' names are equal.
absl::Status Compare(const StepAnswer& answer) {
  const std::vector<StepRecord>& records = *answer.records;
  EK_RETURN_IF_ERROR(CompareJoins(answer.step, records));
  if (answer.lowest_active < 0) return absl::OkStatus();
  const StepRecord& leader = answer.record(answer.lowest_active);
  for (size_t p = 0; p < leader.participants.size(); ++p) {
    const ParticipantState& expected = leader.participants[p];
    for (const Aspect& aspect : kAspects) {
      const auto differs = [&](const StepRecord& record) {
        return !record.joined && aspect.differs(record.participants[p], expected);
      };
      if (std::ranges::none_of(records, differs)) continue;
      std::map<std::string, std::vector<int>> ranks_by_value;
      for (int rank = 0; rank < answer.world_size; ++rank) {
        if (records[rank].joined) continue;
        ranks_by_value[aspect.value(records[rank].participants[p])].push_back(rank);
      }
      return Disagree(absl::StrCat("step ", answer.step, ", ", (*answer.names)[p],
                                   ": the ranks disagree about ", aspect.what, ": "),
                      ranks_by_value);
    }
  }
  return absl::OkStatus();
}

// Returns an error if gradients are to be divided by samples that a rank has not reported.
absl::Status CheckSamples(int64_t step, const StepAnswer& answer) {
  std::vector<int> silent, unknown;
  for (int rank = 0; rank < answer.world_size; ++rank) {
    const StepRecord& record = answer.record(rank);
    if (!record.joined && record.samples == StepRecord::kNotSaid) silent.push_back(rank);
    if (std::ranges::any_of(record.participants, [](const ParticipantState& state) {
          return state.samples == StepRecord::kNotSaid;
        }))
      unknown.push_back(rank);
  }
  if (silent.empty() && unknown.empty()) return absl::OkStatus();
  const std::string what =
      silent.empty() ? absl::StrCat("the gradients of ", RankList(unknown),
                                    " were accumulated without a number of samples, outside of "
                                    "this loop: reduce or clear them before it")
                     : absl::StrCat(RankList(silent),
                                    " passed no number: call JoinScope::AddSamples() before each "
                                    "step");
  return WithFailureInfo(
      absl::FailedPreconditionError(absl::StrCat(
          "step ", step, ": gradients are divided by the samples of all ranks, and ", what)),
      {.ranks = silent.empty() ? unknown : silent});
}

// Returns whether each rank takes its part of the batch, as far as the records show.
bool TakesItsShares(const StepAnswer& answer) {
  if (answer.lowest_active < 0) return true;
  const StepRecord& leader = answer.record(answer.lowest_active);
  if (leader.sharing != 0 && leader.sharing != answer.active) return false;
  return std::ranges::all_of(*answer.records, [&](const StepRecord& record) {
    // A rank that shadows the others has divided the batch in which it had no part, but no later
    // one.
    if (record.joined && record.sharing == 0) return leader.sharing == 0 || record.samples <= 0;
    return record.sharing == leader.sharing && record.shares_hash == leader.shares_hash;
  });
}

// Returns different texts for different shares, by which ranks are compared.
std::string TextOf(const StepShares& shares) {
  if (shares.counts.empty()) return "none";
  const std::string counts = TextOfCounts(shares.counts);
  const uint64_t hash = StableHash(0, internal::ToBytes(shares));
  return absl::StrCat(shares.samples, " samples from ", shares.first, " on as ", counts,
                      counts.ends_with("...") ? absl::StrCat(" (hash ", absl::Hex(hash), ")") : "");
}

// "its share is 64 of 128".
std::string ShareOf(const StepShares& shares, int rank) {
  return absl::StrCat("its share is ", shares.counts[rank], " of ", shares.samples);
}

// Returns the error for ranks that divide the batch equally, and do not take their parts of it.
absl::Status NotTaken(const StepAnswer& answer, const StepShares& shares) {
  std::vector<int> ranks;
  std::string what;
  for (int rank = 0; rank < answer.world_size; ++rank) {
    const StepRecord& record = answer.record(rank);
    const int64_t share = shares.counts[rank];
    std::string wrong;
    if (record.joined && share > 0) {
      wrong = absl::StrCat("rank ", rank, " has no more input, but ", ShareOf(shares, rank),
                           ": end the loop only where the count of Balance::Next() is 0");
    } else if (!record.joined && share == 0) {
      wrong = absl::StrCat("rank ", rank, " takes the step, but ", ShareOf(shares, rank),
                           ": end the loop where the count of Balance::Next() is 0");
    } else if (std::max<int64_t>(record.samples, 0) != share) {
      wrong = absl::StrCat("rank ", rank, " has ",
                           record.samples < 0 ? "no number of" : absl::StrCat(record.samples),
                           " samples where ", ShareOf(shares, rank),
                           ": pass the count of Balance::Next() to JoinScope::AddSamples()");
    }
    if (wrong.empty()) continue;
    if (ranks.empty()) what = std::move(wrong);
    ranks.push_back(rank);
  }
  if (ranks.empty())
    return absl::InternalError("the ranks' hashes differ but their shares do not (internal error)");
  if (ranks.size() > 1) absl::StrAppend(&what, "; ", RankList(ranks), " do not take their shares");
  return WithFailureInfo(
      absl::FailedPreconditionError(absl::StrCat("step ", answer.step, ": ", what)),
      {.kind = FailureKind::kDisagreement, .ranks = std::move(ranks)});
}

absl::Status CompareShares(const StepAnswer& answer, const std::vector<StepDetails>& details) {
  if (answer.lowest_active < 0)
    return absl::InternalError("the ranks' hashes differ but their names do not (internal error)");
  std::map<std::string, std::vector<int>> ranks_by_shares;
  for (int rank = 0; rank < answer.world_size; ++rank) {
    const StepShares& shares = details[rank].shares;
    if (!shares.counts.empty() && static_cast<int>(shares.counts.size()) != answer.world_size)
      return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " sent ", shares.counts.size(),
                                                     " shares for ", answer.world_size, " ranks"));
    if (!answer.record(rank).joined || !shares.counts.empty())
      ranks_by_shares[TextOf(shares)].push_back(rank);
  }
  if (ranks_by_shares.size() > 1 || ranks_by_shares.contains("none")) {
    return Disagree(
        absl::StrCat("step ", answer.step,
                     ": the ranks divide different batches, or divide them differently (call "
                     "Balance::Next() with the same batch on all ranks before each step): "),
        ranks_by_shares);
  }
  return NotTaken(answer, details[answer.lowest_active].shares);
}

}  // namespace

uint64_t HashOfNames(const ParticipantNames& names) {
  return StableHash(0, absl::StrJoin(names, "\n"));
}

std::string TextOfCounts(absl::Span<const int64_t> counts) {
  constexpr size_t kMostListed = 16;
  if (counts.size() <= kMostListed) return absl::StrJoin(counts, ",");
  return absl::StrCat(absl::StrJoin(counts.subspan(0, kMostListed), ","), ",...");
}

absl::Status CompareDetails(const StepAnswer& answer, absl::Span<const std::string> details) {
  std::vector<StepDetails> parsed;
  std::map<std::string, std::vector<int>> ranks_by_names;
  for (int rank = 0; rank < static_cast<int>(details.size()); ++rank) {
    EK_ASSIGN_OR_RETURN(StepDetails one, internal::FromBytes<StepDetails>(
                                             details[rank], "the details of a rank's step"));
    ranks_by_names[one.names.empty() ? "none" : one.names].push_back(rank);
    parsed.push_back(std::move(one));
  }
  if (ranks_by_names.size() == 1) return CompareShares(answer, parsed);
  return Disagree(absl::StrCat("step ", answer.step,
                               ": the ranks have different models and optimizers, or made them in "
                               "a different order: "),
                  ranks_by_names);
}

absl::Status Agree(int64_t step, absl::Span<const std::string> records,
                   std::shared_ptr<const ParticipantNames> names, SamplesRule samples,
                   StepAnswer& answer) {
  answer = {.step = step,
            .world_size = static_cast<int>(records.size()),
            .active = 0,
            .lowest_active = -1,
            .highest_active = -1};
  auto parsed = std::make_shared<std::vector<StepRecord>>();
  parsed->reserve(records.size());
  absl::InlinedVector<std::string, 8> ledgers;
  for (int rank = 0; rank < answer.world_size; ++rank) {
    absl::StatusOr<StepRecord> record = StepRecord::Parse(records[rank]);
    if (!record.ok())
      return Annotate(record.status(), absl::StrCat("step ", step, ", rank ", rank));
    answer.requests |= record->requests;
    answer.samples += std::max<int64_t>(record->samples, 0);
    if (!record->joined) {
      ++answer.active;
      if (answer.lowest_active < 0) answer.lowest_active = rank;
      answer.highest_active = rank;
    }
    ledgers.push_back(std::exchange(record->ledger, ""));
    parsed->push_back(*std::move(record));
  }
  answer.records = std::move(parsed);
  answer.names = std::move(names);
  EK_RETURN_IF_ERROR(Annotate(StepLedger::Compare(ledgers), absl::StrCat("step ", step)));
  const bool same_names = std::ranges::all_of(*answer.records, [&](const StepRecord& record) {
    return record.names_hash == (*answer.records)[0].names_hash;
  });
  if (!same_names) {
    EK_RETURN_IF_ERROR(CompareJoins(step, *answer.records));
    return absl::NotFoundError("the ranks' participants differ");
  }
  for (int rank = 0; rank < answer.world_size; ++rank) {
    if ((*answer.records)[rank].participants.size() == answer.names->size()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("step ", step, ", rank ", rank, ": the record has the states of ",
                     (*answer.records)[rank].participants.size(), " participants instead of ",
                     answer.names->size(), " (internal error)"));
  }
  EK_RETURN_IF_ERROR(Compare(answer));
  if (!TakesItsShares(answer)) return absl::NotFoundError("a rank does not take its share");
  return samples == SamplesRule::kRequired ? CheckSamples(step, answer) : absl::OkStatus();
}

void StepRecord::SetShares(const StepShares& shares, int rank) {
  const int64_t mine = shares.counts[rank];
  const auto has_part = [](int64_t count) { return count > 0; };
  shares_hash = static_cast<uint32_t>(StableHash(0, internal::ToBytes(shares)));
  sharing = mine != std::max<int64_t>(samples, 0) || joined == has_part(mine)
                ? kOtherSamples
                : static_cast<int32_t>(std::ranges::count_if(shares.counts, has_part));
}

bool StepRecord::reduces() const {
  return std::ranges::all_of(participants, &ParticipantState::sync);
}

std::string StepRecord::Serialize() const {
  const uint8_t version = kVersion;
  internal::FieldWriter writer;
  writer(writer.UpTo(version, kVersion), *this);
  return writer.Take();
}

absl::StatusOr<StepRecord> StepRecord::Parse(absl::string_view bytes) {
  const uint8_t version = bytes.empty() ? kVersion : static_cast<uint8_t>(bytes[0]);
  if (version != kVersion) {
    return absl::InvalidArgumentError(absl::StrCat("the record of a step has version ", version,
                                                   ", this build reads ", kVersion,
                                                   ": run the same build on all ranks"));
  }
  return internal::FromBytes<StepRecord>(bytes.substr(bytes.empty() ? 0 : 1),
                                         "the record of a step");
}

const ParticipantState* StepAnswer::StateOf(absl::string_view participant_name, int rank) const {
  if (records == nullptr || rank < 0) return nullptr;
  const auto found = std::ranges::find(*names, participant_name);
  return found == names->end() ? nullptr : &record(rank).participants[found - names->begin()];
}

ParticipantState StepAnswer::LeaderState(absl::string_view participant_name) const {
  const ParticipantState* state = StateOf(participant_name, lowest_active);
  return state == nullptr ? ParticipantState() : *state;
}

int64_t StepAnswer::SamplesOf(absl::string_view participant_name) const {
  int64_t sum = samples;
  for (int rank = 0; rank < world_size && records != nullptr; ++rank) {
    const ParticipantState* state = StateOf(participant_name, rank);
    if (state != nullptr) sum += std::max<int64_t>(state->samples, 0);
  }
  return sum;
}

}  // namespace evenkeel
