#include "evenkeel/tools/predict/replay.h"

#include <sys/prctl.h>

#include <algorithm>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/value_memory.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/trainer/report/chrome_trace.h"
#include "evenkeel/trainer/report/gather_records.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/trainer/report/step_trace.h"
#include "evenkeel/trainer/report/trace_settings.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

void SleepUntil(absl::Time time) { absl::SleepFor(time - SteadyNow()); }

// A parameter for each bucket.
class Replayer {
 public:
  Replayer(Communicator& comm, const StepParts& parts, const ReplayOptions& options)
      : comm_(comm),
        parts_(parts),
        options_(options),
        recorder_(options.steps, options.steps),
        random_(1 + static_cast<uint64_t>(comm.rank())) {}

  absl::Status Run() {
    prctl(PR_SET_TIMERSLACK, 1);  // Otherwise each sleep ends about 50 us late.
    std::vector<std::vector<float>> memory;
    for (const StepParts::Bucket& bucket : parts_.buckets) {
      const auto count = static_cast<size_t>(bucket.bytes) / sizeof(float);
      for (int i = 0; i < 2; ++i) memory.emplace_back(count);
    }
    for (size_t b = 0; b < parts_.buckets.size(); ++b) {
      params_.Add(absl::StrCat("bucket", b), absl::MakeSpan(memory[2 * b]),
                  absl::MakeSpan(memory[2 * b + 1]));
    }
    EK_ASSIGN_OR_RETURN(value_memory_, MoveValues(comm_, params_));
    std::vector<float> buffer(static_cast<size_t>(parts_.buffer_bytes) / sizeof(float));
    std::vector<TensorView> buffers;
    if (!buffer.empty()) buffers.emplace_back(absl::MakeSpan(buffer));
    const DataParallelOptions options{
        .reducer = {.caps = {Bytes{0}}, .gradient_as_bucket_view = true, .stats_every = 1}};
    EK_ASSIGN_OR_RETURN(ddp_, DataParallel::Create(&comm_, &params_, buffers, options));
    if (parts_.is_sliced) {
      EK_ASSIGN_OR_RETURN(optimizer_, Optimizer::Create(*ddp_, Sgd{}, {.placement = Slices{}}));
    }
    for (int64_t step = 0; step < options_.steps; ++step) EK_RETURN_IF_ERROR(Step(step));
    optimizer_.reset();
    ddp_.reset();
    return absl::OkStatus();
  }

  std::vector<StepTrace> traces() const { return recorder_.traces(); }

 private:
  absl::Status Step(int64_t step) {
    const double deviation = std::max(0.1, 1 + parts_.spread * normal_(random_));
    recorder_.Begin(step);
    params_.ClearGradients();
    EK_RETURN_IF_ERROR(ddp_->BeginStep());
    absl::SleepFor(absl::Seconds(parts_.begin));
    recorder_.Mark(SpanKind::kBegin);
    const absl::Time begun = SteadyNow();
    for (size_t b = 0; b < parts_.buckets.size(); ++b) {
      SleepUntil(begun + absl::Seconds(deviation * parts_.buckets[b].ready));
      params_.SetGradState(static_cast<int>(b), GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp_->GradientReady(static_cast<int>(b)));
    }
    SleepUntil(begun + absl::Seconds(deviation * parts_.compute));
    recorder_.Mark(SpanKind::kBackward);
    EK_RETURN_IF_ERROR(ddp_->FinishStep());
    recorder_.Mark(SpanKind::kWait);
    absl::SleepFor(absl::Seconds(parts_.optimizer / (parts_.is_sliced ? comm_.world_size() : 1)));
    if (optimizer_ != nullptr) EK_RETURN_IF_ERROR(optimizer_->Step());
    recorder_.Mark(SpanKind::kOptimizer);
    recorder_.End(ddp_->reducer().last_step(), ddp_->buckets());
    return absl::OkStatus();
  }

  Communicator& comm_;
  const StepParts parts_;
  const ReplayOptions options_;
  StepRecorder recorder_;
  Memory value_memory_;
  ParameterSet params_;
  std::unique_ptr<DataParallel> ddp_;
  std::unique_ptr<Optimizer> optimizer_;  // One of slices.
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
};

}  // namespace

absl::Status Replay(Communicator& comm, const StepParts& parts, const ReplayOptions& options,
                    const std::string& path) {
  Replayer replayer(comm, parts, options);
  const int64_t begin_ns = absl::ToUnixNanos(SteadyNow());
  EK_RETURN_IF_ERROR(replayer.Run());
  const RankRecord mine{.rank = comm.rank(), .host = HostName(), .traces = replayer.traces()};
  EK_ASSIGN_OR_RETURN(std::vector<RankRecord> ranks, GatherRecords(comm, mine));
  if (comm.rank() != 0) return absl::OkStatus();
  RunRecord record{
      .title = absl::StrCat("replay of ", options.title),
      .world_size = comm.world_size(),
      .begin_ns = begin_ns,
      .ranks = std::move(ranks),
      .settings = {{TraceSettings::kRanks, absl::StrCat(comm.world_size())},
                   {TraceSettings::kBackend, std::string(comm.backend_name())},
                   {TraceSettings::kState,
                    parts.is_sliced ? TraceSettings::kSliced : TraceSettings::kReplicated},
                   {TraceSettings::kSentAs, "none"}}};
  if (parts.buffer_bytes > 0)
    record.settings.push_back({TraceSettings::kBufferBytes, absl::StrCat(parts.buffer_bytes)});
  return WriteFileAtomically(path, RenderTrace(record));
}

}  // namespace evenkeel
