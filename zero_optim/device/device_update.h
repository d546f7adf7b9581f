// Optimizer steps on a device: measure gradients, decide, update; nothing of it waits for the host.
//
//   EK_ASSIGN_OR_RETURN(auto update, DeviceUpdate::Create(comm.runtime(), device, params.size()));
//   EK_RETURN_IF_ERROR(update->SetList(0, items, stream));  // costs a comparison unless it changed
//   // if the step clips, or may be skipped
//   EK_RETURN_IF_ERROR(update->Measure(0, /*norm=*/2, stream));
//   ... all-reduce update->found(), if the ranks have parts ...
//   // decides, counts the parameters' steps
//   EK_RETURN_IF_ERROR(update->Prepare(0, rules, step, stream));
//   EK_RETURN_IF_ERROR(update->Apply(0, stream));  // updates values and state
//   // the host waits, if anybody asks
//   EK_ASSIGN_OR_RETURN(auto check, update->LastCheck(deadline));
//
// Launches: Measure() two, Prepare() one (per 16 rules), Apply() one per kind of rule and type of
//           value in the list.
// Steps:    a parameter's step count lies on the device, since whether a step counts may be decided
//           there. It is read and written as a whole, by the host, where state is saved, loaded or
//           moved.
// Rounding: float32 as on the CPU, bit for bit, but for what update.cuh says. A bfloat16 value is
//           rounded from its master copy, which is float32 as all state is, and begins as the value
//           at the parameter's first update.
// Norms:    summed in double in an order that depends on the list alone.
// Lists:    several, by number; what is in two of them is not updated twice in a step by anybody
//           who wants one update.
// Order:    all calls put work on `stream` and wait for none. With more than one stream the caller
//           orders them.
// Threads:  thread-compatible.
// Ownership: the runtime outlives it; items' memory outlives what runs, and it waits for that when
//            it goes.

#ifndef EVENKEEL_ZERO_OPTIM_DEVICE_DEVICE_UPDATE_H_
#define EVENKEEL_ZERO_OPTIM_DEVICE_DEVICE_UPDATE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/step_options.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {

struct DeviceUpdateItem {
  int param = 0;
  int rule = 0;   // Which of those that Prepare() gets.
  int flag = -1;  // Which of its flags, if any.
  TensorView value, gradient;
  absl::Span<const TensorView>
      state;  // In the order of StateTensors() (update_rule.h); looked at by SetList() alone.
};

class DeviceUpdate {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceUpdate>> Create(DeviceRuntime* runtime, Device device,
                                                              int param_count);
  ~DeviceUpdate();

  // Only the kinds in `rules` are kept, their numbers come with Prepare(). Items without state can
  // only be measured.
  absl::Status SetList(int list, absl::Span<const UpdateRule> rules,
                       absl::Span<const DeviceUpdateItem> items, StreamRef stream);

  absl::Status Measure(int list, double norm, StreamRef stream);
  // Returns Measure()'s result: the sum of |g|^p, or the largest |g|; and a number that is not 0 if
  // something is not finite.
  TensorView found() const;
  // By what gradients are multiplied; if measured, clipping and skipping, too. `flags`, float32 or
  // bfloat16 on the device: an item whose flag is 0 is left alone, its step count too. Its gradient
  // must be zeros where it is measured.
  absl::Status Prepare(int list, absl::Span<const UpdateRule> rules, const StepOptions& options,
                       bool is_measured, StreamRef stream, const TensorView& flags = {});
  absl::Status Apply(int list, StreamRef stream);

  // Returns the check of the last Prepare() with a measure, or of that `back` times before it, at
  // most once. Waits until it is there; the host does so only if it is not there yet.
  absl::StatusOr<std::optional<GradientCheck>> LastCheck(absl::Time deadline, int back = 0);
  // Returns Measure()'s result as a check, for information only. The host waits.
  absl::StatusOr<GradientCheck> CheckNow(double norm, double grad_scale, StreamRef stream,
                                         absl::Time deadline);

  int64_t checks() const { return check_count_; }  // So many there have been.

  // The step counts, by parameter. The host waits in the first.
  absl::StatusOr<std::vector<int64_t>> ReadSteps(StreamRef stream, absl::Time deadline);
  absl::Status WriteSteps(absl::Span<const int64_t> steps, StreamRef stream);

  // Frees the memory once what is on the stream now has run.
  absl::Status Keep(Memory memory, StreamRef stream);

 private:
  struct List;
  struct CheckPlace {
    Memory pinned;
    Event written;
  };

  DeviceUpdate(DeviceRuntime* runtime, Device device, int param_count);
  absl::StatusOr<Memory> Upload(const void* data, int64_t bytes, StreamRef stream);
  // Notes that `stream` works with this object's memory.
  absl::Status Used(StreamRef stream);
  absl::Status CopyToHost(Memory& pinned, const Memory& from, StreamRef stream,
                          absl::Time deadline);

  DeviceRuntime* const runtime_;
  const Device device_;
  const int param_count_;
  Memory steps_, numbers_, found_, check_;
  std::vector<std::unique_ptr<List>> lists_;
  std::array<CheckPlace, 2> checks_;
  int64_t check_count_ = 0;
  std::vector<std::pair<Event, Memory>> kept_;
  std::vector<std::pair<void*, Event>> last_use_;  // By stream.
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_DEVICE_DEVICE_UPDATE_H_
