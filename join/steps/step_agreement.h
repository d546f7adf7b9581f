// The records that all ranks send when a training step begins, and their comparison.
//
//   std::string bytes = record.Serialize();                       // on each rank
//   StepAnswer answer;
//   EK_RETURN_IF_ERROR(Agree(step, all_bytes, names, SamplesRule::kOptional, answer));
//
// Every rank computes the same answer, or the same error, from the same records.
//
// A record also contains the rank's ledger (join/steps/step_ledger.h): the number of steps that
// each part has finished, and their settings. The ledgers of all ranks are compared, so that no
// rank continues after a step that another rank omitted or took differently.
//
// Participants are in the order of their registration, which is the same on all ranks: a record has
// a hash of the ordered names, and a difference is an error that shows the lists of the ranks.
//
// Size:    a record has 55 bytes, 37 for each participant (and its note), about 19 for the times of
//          the last step, and the ledger's text: 55 + 37 + 19 + 62 = 173 for a DataParallel and a
//          Replicated optimizer, which is no participant. Each rank sends one for each step, and
//          receives all of them.
//
// If the ranks divide batches by their speed (join/balance.h), a record also contains a hash of the
// division. A difference is an error that shows the divisions of the ranks.
//
// A record also contains the times of the rank's last step (phase_clock.h). From the times of all
// ranks, each rank computes which ranks made the others wait (straggler_detector.h).
//
// Threads: pure functions of values.
// Errors:  FailedPrecondition with a FailureInfo that names the fewest ranks that can be the cause.

#ifndef EVENKEEL_JOIN_STEPS_STEP_AGREEMENT_H_
#define EVENKEEL_JOIN_STEPS_STEP_AGREEMENT_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/join/steps/phase_clock.h"

namespace evenkeel {

// The state of one participant of one rank before a step.
struct ParticipantState {
  uint64_t generation = 0;     // The plan's.
  uint64_t schedule_hash = 0;  // Identifies the collectives that the step will issue.
  uint64_t mask_hash = 0;      // Identifies the set of trained parameters.
  bool sync = true;            // Whether gradients are reduced in this step.
  // This rank's samples in gradients that earlier steps have accumulated and no step has reduced;
  // StepRecord::kNotSaid if their number is unknown.
  int64_t samples = 0;
  // For messages only: "frozen: fc1.weight, fc1.bias". Empty normally; cut off after 256 bytes.
  std::string note;

  static void VisitFields(auto& self, auto& visit) {
    visit(self.generation, self.schedule_hash, self.mask_hash, self.sync, self.samples,
          visit.Short(self.note, 256));
  }

  // Returns whether an exhausted rank in this state can shadow a rank in `other`.
  bool SamePlan(const ParticipantState& other) const {
    return generation == other.generation && schedule_hash == other.schedule_hash &&
           mask_hash == other.mask_hash;
  }
};

// Requests of one rank to all ranks, as bits: StepControl::Request() sets them in this rank's next
// record, and StepAnswer::requests has those of all ranks. The library only transmits them.
struct StepRequests {
  static constexpr uint32_t kStop = 1;      // After this step.
  static constexpr uint32_t kSave = 2;      // A checkpoint, after this step.
  static constexpr uint32_t kEvaluate = 4;  // After this step.
  static constexpr uint32_t kFirstOfUsers = 1u << 16;
};

// The division of one step's batch between the ranks, as one of them has made it.
struct StepShares {
  int64_t first = 0;            // The batch has the samples from `first`
  int64_t samples = 0;          // to `first + samples - 1`.
  std::vector<int64_t> counts;  // By rank: its part of them. Empty: the rank has made no division.

  static void VisitFields(auto& self, auto& visit) { visit(self.first, self.samples, self.counts); }
  friend bool operator==(const StepShares&, const StepShares&) = default;
};

// Returns "176,80"; of more than 16 counts the first ones, and "...".
std::string TextOfCounts(absl::Span<const int64_t> counts);

// The record that a rank sends when its step begins.
struct StepRecord {
  static constexpr uint8_t kVersion = 6;  // The first byte of the serialized form.
  static constexpr int64_t kNotSaid = -1;
  static constexpr int32_t kOtherSamples = -1;

  bool joined = false;              // The rank is exhausted.
  uint32_t requests = 0;            // StepRequests.
  int64_t samples = kNotSaid;       // The samples that AddSamples() added since the last record.
  int64_t calls = 0;                // User collectives issued or shadowed: AnnounceCall().
  uint64_t scope_hash = 0;          // Identifies RunJoined()'s list and options; 0: outside of it.
  std::optional<PhaseTimes> times;  // Up to the last reduction, since the one before it.
  std::string ledger;       // StepLedger::Serialize(); empty in an answer: it has been compared.
  uint64_t names_hash = 0;  // HashOfNames() of the participants.
  std::vector<ParticipantState> participants;
  uint32_t shares_hash = 0;  // Identifies the rank's StepShares.
  // The number of ranks that have a part of the batch; 0: this rank has no StepShares;
  // kOtherSamples: its samples are not its part, or it takes the step without a part of the batch,
  // or is exhausted although it has one. Exhausted ranks compare the number with that of the active
  // ranks, because they do not know the batch.
  int32_t sharing = 0;

  static void VisitFields(auto& self, auto& visit) {
    visit(self.joined, self.requests, self.samples, self.calls, self.scope_hash, self.shares_hash,
          self.sharing, self.names_hash, self.ledger, self.times);
    if (self.times.has_value()) visit(self.times->ready);
    visit(self.participants);
  }
  // Sets the fields for `shares`, when all others of this rank's record are complete.
  void SetShares(const StepShares& shares, int rank);
  // Returns whether the step reduces the gradients of all participants.
  bool reduces() const;
  std::string Serialize() const;  // The version, then the fields.
  static absl::StatusOr<StepRecord> Parse(absl::string_view bytes);
};

// The names of a rank's participants, in the order of their registration.
using ParticipantNames = std::vector<std::string>;
uint64_t HashOfNames(const ParticipantNames& names);

// All records of a step. Equal on all ranks.
struct StepAnswer {
  int64_t step = 0;
  int world_size = 1;
  int active = 1;         // The number of ranks with inputs.
  int lowest_active = 0;  // -1: none.
  int highest_active = 0;
  uint32_t requests = 0;  // Those of all ranks, by OR.
  int64_t samples = 0;    // The sum over ranks; of exhausted ranks, samples not yet reported.
  std::shared_ptr<const std::vector<StepRecord>> records =
      nullptr;  // By rank; null in a step without agreement.
  std::shared_ptr<const ParticipantNames> names = nullptr;

  const StepRecord& record(int rank) const { return (*records)[rank]; }
  bool everyone_active() const { return active == world_size; }
  // Returns whether there are active ranks and none of them accumulates in this step.
  bool reduces() const { return lowest_active >= 0 && record(lowest_active).reduces(); }
  // Returns the state of that participant on that rank; null if it is unknown.
  const ParticipantState* StateOf(absl::string_view participant_name, int rank) const;
  // Returns the state of that participant on the lowest active rank; the neutral one if unknown.
  ParticipantState LeaderState(absl::string_view participant_name) const;
  // Returns the samples of all ranks in the gradients of that participant: those of this step, and
  // those that it had accumulated before.
  int64_t SamplesOf(absl::string_view participant_name) const;
};

// Whether each active rank must have reported its samples.
enum class SamplesRule { kOptional, kRequired };

// Parses the records of all ranks, which are in the order of ranks, and compares them: all ranks
// must run the same join, all active ranks must have equal states, and each rank must take its part
// of the batch. `names` are those of this rank's participants. `answer` is complete even if the
// ranks disagree; its records are null if one cannot be parsed. Returns NotFound, on all ranks, if
// their names differ or their shares are wrong; the caller then gathers the StepDetails of all
// ranks, and CompareDetails() returns the error for the user.
absl::Status Agree(int64_t step, absl::Span<const std::string> records,
                   std::shared_ptr<const ParticipantNames> names, SamplesRule samples,
                   StepAnswer& answer);

// The values of one rank that its record identifies by hashes.
struct StepDetails {
  std::string names;  // Of its participants, separated by ", ".
  StepShares shares;

  static void VisitFields(auto& self, auto& visit) { visit(self.names, self.shares); }
};

// Returns the error for a step for which Agree() has returned NotFound. `details`: StepDetails as
// bytes, by rank.
absl::Status CompareDetails(const StepAnswer& answer, absl::Span<const std::string> details);

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_STEP_AGREEMENT_H_
