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
// Size:    a record has 47 bytes, 37 for each participant (and its note), about 19 for the times of
//          the last step, and the ledger's text: 47 + 37 + 19 + 62 = 165 for a DataParallel and a
//          Replicated optimizer, which is no participant. Each rank sends one for each step, and
//          receives all of them.
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

// The record that a rank sends when its step begins.
struct StepRecord {
  static constexpr uint8_t kVersion = 5;  // The first byte of the serialized form.
  static constexpr int64_t kNotSaid = -1;

  bool joined = false;              // The rank is exhausted.
  uint32_t requests = 0;            // StepRequests.
  int64_t samples = kNotSaid;       // The samples that AddSamples() added since the last record.
  int64_t calls = 0;                // User collectives issued or shadowed: AnnounceCall().
  uint64_t scope_hash = 0;          // Identifies RunJoined()'s list and options; 0: outside of it.
  std::optional<PhaseTimes> times;  // Up to the last reduction, since the one before it.
  std::string ledger;       // StepLedger::Serialize(); empty in an answer: it has been compared.
  uint64_t names_hash = 0;  // HashOfNames() of the participants.
  std::vector<ParticipantState> participants;

  static void VisitFields(auto& self, auto& visit) {
    visit(self.joined, self.requests, self.samples, self.calls, self.scope_hash, self.names_hash,
          self.ledger, self.times);
    if (self.times.has_value()) visit(self.times->ready);
    visit(self.participants);
  }
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
// must run the same join, and all active ranks must have equal states. `names` are those of this
// rank's participants. `answer` is complete even if the ranks disagree; its records are null if one
// cannot be parsed. Returns NotFound if the ranks' names differ; the caller then
// gathers the names, and CompareNames() returns the error for the user.
absl::Status Agree(int64_t step, absl::Span<const std::string> records,
                   std::shared_ptr<const ParticipantNames> names, SamplesRule samples,
                   StepAnswer& answer);

// Returns the error for ranks whose names differ. `lists` has the names of each rank, separated by
// ", ".
absl::Status CompareNames(int64_t step, absl::Span<const std::string> lists);

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_STEP_AGREEMENT_H_
