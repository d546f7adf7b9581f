// Computes a StragglerReport (straggler_report.h) from the phase times of all ranks, step by step.
//
//   StragglerDetector detector(world_size);
//   detector.Add(times);                            // by rank, for each step's records
//   detector.Recent().Stragglers();
//
// Steps are collected in blocks. The report about recent steps covers the last kBlocks full blocks,
// whose differences show how certain a rank's cost is. Equal input gives equal reports on all
// ranks.
//
// Size:    kBlocks + 2 blocks of 104 bytes per rank.
// Threads: thread-compatible.

#ifndef EVENKEEL_JOIN_STEPS_STRAGGLER_DETECTOR_H_
#define EVENKEEL_JOIN_STEPS_STRAGGLER_DETECTOR_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "evenkeel/join/steps/straggler_report.h"

namespace evenkeel {

class StragglerDetector {
 public:
  static constexpr int kBlocks = 20;
  // A block ends after this number of steps and this time. So the blocks last 10 s at least, and a
  // rank is a straggler if it is delayed in 13 of them (6.5 s): machines delay a process for
  // seconds without being slow.
  static constexpr int64_t kStepsPerBlock = 25;
  static constexpr int64_t kLeastBlockUs = 500'000;
  // A block of long steps ends after this time, but not before this number of steps.
  static constexpr int64_t kBlockUs = 5'000'000;
  static constexpr int64_t kLeastStepsPerBlock = 3;

  // The times of one rank since the last reduction. Without times the rank is exhausted, or has had
  // no reduction.
  struct RankTimes {
    std::optional<PhaseTimes> times;
    bool is_exhausted = false;  // In the next step.
    int64_t samples = 0;        // Those of `times`; 0 if the rank does not report them.
  };

  explicit StragglerDetector(int world_size)
      : now_(world_size), all_(world_size), recent_report_(ReportOf(now_)) {}

  void Add(absl::Span<const RankTimes> ranks);

  // Returns the report of the last kBlocks blocks.
  const StragglerReport& Recent() const { return recent_report_; }
  StragglerReport All() const;
  // Returns whether a rank has become a straggler, or one in another phase, since the last call.
  bool TakeNews() { return std::exchange(has_news_, false); }

 private:
  struct RankSums {
    int64_t steps = 0;      // Steps in which it had inputs,
    int64_t active_us = 0;  // their duration,
    int64_t samples = 0;    // and its samples in them.
    double part_us = 0;     // Its part of the differences between the ranks.
    PhaseTimes times;
  };
  struct Sums {
    explicit Sums(int world_size) : ranks(world_size) {}
    void Add(const Sums& other);

    int64_t steps = 0;
    int64_t time_us = 0;
    std::vector<RankSums> ranks;
  };
  static StragglerReport ReportOf(const Sums& sums);
  StragglerReport ReportOfRecent() const;
  void LookForNews();

  Sums now_;                          // The current block.
  Sums all_;                          // All steps before it.
  std::deque<Sums> recent_;           // Full blocks.
  StragglerReport recent_report_;     // Made once per block: each heartbeat reads it.
  std::vector<bool> were_exhausted_;  // In the step of the times to come.
  bool has_news_ = false;
  // By rank: the phases in which it was a straggler, as bits. A delay that two phases share is news
  // once for each of them.
  std::vector<uint32_t> reported_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_STRAGGLER_DETECTOR_H_
