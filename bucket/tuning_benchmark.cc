// Measures how much communication is left after backward with tuned caps, beside the default caps:
// 32 gradients of 512 KiB, one every 250 us (a sleep: a device would compute), in process and over
// TCP. Steps of both alternate on the same ranks; `ratio` is the median of the pairs'.
//
//   bazel run //bucket:tuning_benchmark

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "benchmark/benchmark.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/groups.h"

namespace evenkeel {
namespace {

constexpr int kParams = 32;
constexpr int kCount = 128 << 10;
constexpr int kPairs = 60;
constexpr int kTuningSteps = 10;

class Replica {
 public:
  Replica() : values_(kParams, std::vector<float>(kCount, 1.0f)), grads_(values_) {
    for (int p = 0; p < kParams; ++p) {
      params_.Add(absl::StrCat("p", p), absl::MakeSpan(values_[p]), absl::MakeSpan(grads_[p]));
    }
  }
  absl::Status Wrap(Communicator& comm, bool tune) {
    EK_ASSIGN_OR_RETURN(ddp_, DataParallel::Create(&comm, &params_, {},
                                                   {.reducer = {.gradient_as_bucket_view = true,
                                                                .tune = tune,
                                                                .tuning_steps = kTuningSteps}}));
    return absl::OkStatus();
  }
  absl::Status Step() {
    params_.ClearGradients();
    EK_RETURN_IF_ERROR(ddp_->BeginStep());
    for (int p = kParams - 1; p >= 0; --p) {
      absl::SleepFor(absl::Microseconds(250));
      params_.SetGradState(p, GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp_->GradientReady(p));
    }
    return ddp_->FinishStep();
  }
  double exposed_us() const {
    return absl::ToDoubleMicroseconds(Durations(ddp_->reducer().last_step()).exposed);
  }
  ReducerStats stats() const { return ddp_->reducer().stats(); }

 private:
  std::vector<std::vector<float>> values_, grads_;
  ParameterSet params_;
  std::unique_ptr<DataParallel> ddp_;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void BM_ExposedCommunication(benchmark::State& state) {
  const internal::Transport transport =
      state.range(1) != 0 ? internal::Transport::kTcp : internal::Transport::kLocal;
  for (auto _ : state) {
    const absl::Status status = internal::RunRanksOver(
        transport, static_cast<int>(state.range(0)), [&](Communicator& comm) -> absl::Status {
          Replica plain, tuned;
          EK_RETURN_IF_ERROR(plain.Wrap(comm, false));
          EK_RETURN_IF_ERROR(tuned.Wrap(comm, true));
          for (int step = 0; step < kTuningSteps + 2; ++step) {
            EK_RETURN_IF_ERROR(plain.Step());
            EK_RETURN_IF_ERROR(tuned.Step());
          }
          std::vector<double> of_plain, of_tuned, ratios;
          for (int pair = 0; pair < kPairs; ++pair) {
            EK_RETURN_IF_ERROR(plain.Step());
            EK_RETURN_IF_ERROR(tuned.Step());
            of_plain.push_back(plain.exposed_us());
            of_tuned.push_back(tuned.exposed_us());
            ratios.push_back(of_tuned.back() / of_plain.back());
          }
          if (comm.rank() != 0) return absl::OkStatus();
          const TuningStats tuning = tuned.stats().tuning;
          state.counters["ratio"] = Median(ratios);
          state.counters["default_us"] = Median(of_plain);
          state.counters["tuned_us"] = Median(of_tuned);
          state.counters["predicted_default_us"] = tuning.predicted_before_us;
          state.counters["predicted_tuned_us"] = tuning.predicted_after_us;
          state.counters["link_latency_us"] = tuning.link_latency_us;
          state.counters["link_GB/s"] = tuning.link_bytes_per_second / 1e9;
          state.counters["buckets"] = static_cast<double>(tuned.stats().buckets.size());
          return absl::OkStatus();
        });
    if (!status.ok()) state.SkipWithError(std::string(status.message()).c_str());
  }
}
BENCHMARK(BM_ExposedCommunication)
    ->ArgNames({"world", "tcp"})
    ->ArgsProduct({{2, 4}, {0, 1}})
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace evenkeel
