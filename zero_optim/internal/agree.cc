#include "evenkeel/zero_optim/internal/agree.h"

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/internal/step_message.h"

// Two rounds: first a hash of everything; only if those differ, everything.

namespace evenkeel::internal {
namespace {

// What must be equal, line by line.
std::string Line(const ParameterSet& params, const UpdateRule& rule, SameIn same, int line) {
  if (line == 0 && same == SameIn::kEverything) return ToString(rule);
  if (line == 0) {
    return absl::StrCat(std::vector<std::string>(absl::StrSplit(ToString(rule), '('))[0], " with {",
                        absl::StrJoin(StateTensorNames(rule), ", "), "}");
  }
  if (line == 1) return absl::StrCat(params.size(), " parameters");
  const int i = line - 2;
  return absl::StrCat("parameter ", i, " = ", params[i].name, " ", ToString(params[i].value),
                      same == SameIn::kShape || params.trainable(i) ? "" : ", frozen");
}

int LineCount(const ParameterSet& params) { return params.size() + 2; }

std::string Summary(const absl::Status& own, const ParameterSet& params, const UpdateRule& rule, SameIn same) {
  uint64_t hash = 0;
  if (own.ok()) {
    for (int line = 0; line < LineCount(params); ++line) hash = StableHash(hash, Line(params, rule, same, line));
  }
  return ByteWriter().I32(static_cast<int>(own.code())).Bytes(own.message()).U64(hash).Take();
}

// The status that a rank's summary says, with the rank.
absl::Status StatusOf(int rank, absl::string_view summary) {
  ByteReader reader(summary);
  const int code = reader.I32();
  const absl::string_view message = reader.Bytes();
  reader.U64();
  EK_RETURN_IF_ERROR(Annotate(reader.Finish("a summary"), absl::StrCat("rank ", rank)));
  return Annotate(absl::Status(static_cast<absl::StatusCode>(code), message), absl::StrCat("rank ", rank));
}

absl::Status FirstDifference(const std::string& name, const std::vector<std::string>& texts) {
  std::vector<std::vector<std::string>> lines;
  for (const std::string& text : texts) lines.push_back(absl::StrSplit(text, '\n'));
  for (size_t line = 0; line < lines[0].size(); ++line) {
    std::vector<int> same, other;
    for (int rank = 0; rank < static_cast<int>(lines.size()); ++rank) {
      const bool is_same = line < lines[rank].size() && lines[rank][line] == lines[0][line];
      (is_same ? same : other).push_back(rank);
    }
    if (other.empty()) continue;
    std::vector<std::string> values = {absl::StrCat(RankList(same), ": ", lines[0][line])};
    for (int rank : other) {
      values.push_back(absl::StrCat("rank ", rank, ": ", line < lines[rank].size() ? lines[rank][line] : "nothing"));
      if (values.size() > 8) break;  // Enough to see what is wrong.
    }
    return absl::InvalidArgumentError(absl::StrCat(name, ": the ranks differ: ", absl::StrJoin(values, "; ")));
  }
  return absl::InternalError(absl::StrCat(name, ": the ranks differ in what they can't tell"));
}

}  // namespace

absl::Status CheckSameOnAllRanks(Communicator& comm, const std::string& name, const absl::Status& own,
                                 const ParameterSet& params, const UpdateRule& rule, SameIn same) {
  if (comm.world_size() == 1) return Annotate(own, name);
  EK_ASSIGN_OR_RETURN(
      const std::vector<std::string> summaries,
      comm.control().Exchange(absl::StrCat(name, "/same"), Summary(own, params, rule, same), comm.timeout()));
  bool is_same = true;
  for (int rank = 0; rank < comm.world_size(); ++rank) {
    EK_RETURN_IF_ERROR(Annotate(StatusOf(rank, summaries[rank]), name));
    is_same = is_same && summaries[rank] == summaries[0];
  }
  if (is_same) return absl::OkStatus();
  std::vector<std::string> lines;
  for (int line = 0; line < LineCount(params); ++line) lines.push_back(Line(params, rule, same, line));
  EK_ASSIGN_OR_RETURN(
      const std::vector<std::string> texts,
      comm.control().Exchange(absl::StrCat(name, "/lines"), absl::StrJoin(lines, "\n"), comm.timeout()));
  return FirstDifference(name, texts);
}

absl::StatusOr<UpdateRule> RuleOfLastJoiners(Communicator& comm, const std::string& name, const UpdateRule& rule,
                                             bool is_last_joiner) {
  const std::string mine = is_last_joiner ? StepMessage{.rule = rule}.Serialize() : "";
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      comm.control().Exchange(absl::StrCat("rule/", name), mine, comm.timeout()));
  int source = -1;
  for (int rank = 0; rank < comm.world_size(); ++rank) {
    if (parts[rank].empty()) continue;
    if (source >= 0 && parts[rank] != parts[source]) {
      return absl::FailedPreconditionError(
          absl::StrCat(name, ": ranks ", source, " and ", rank, " ended the loop with different settings"));
    }
    source = rank;
  }
  if (source < 0) return rule;
  EK_ASSIGN_OR_RETURN(const StepMessage last, StepMessage::Parse(parts[source], 0));
  return last.rule;
}

}  // namespace evenkeel::internal
