// The run's settings in a trace (chrome_trace.h) that tools/predict reads: their names, and the
// values of the optimizer's state.
//
// Threads: constants.

#ifndef EVENKEEL_TRAINER_REPORT_TRACE_SETTINGS_H_
#define EVENKEEL_TRAINER_REPORT_TRACE_SETTINGS_H_

namespace evenkeel {

struct TraceSettings {
  static constexpr char kRanks[] = "ranks";
  static constexpr char kBackend[] = "backend";
  static constexpr char kState[] = "optimizer's state";
  static constexpr char kReplicated[] = "state on every rank";
  static constexpr char kSliced[] = "state sharded in equal slices";
  static constexpr char kSentAs[] = "gradients are sent as";
  static constexpr char kBufferBytes[] = "bytes of buffers";
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_TRACE_SETTINGS_H_
