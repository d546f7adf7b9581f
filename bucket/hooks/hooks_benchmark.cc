// Measures a step's cost with each reduction: 8 matrices of 256 x 1024 float32 (8 MiB of gradients,
// a bucket per 2 MiB), nothing computed, between two ranks that are threads, in memory and over TCP
// on the loopback.
//
//   # "step" is a step's time, "wire" what a rank sends in it
//   bazel run //bucket/hooks:hooks_benchmark
//
// Memory and the loopback are faster than any network, and two ranks share a machine here: what is
// measured is what the hooks compute, more than what they save. A network of b bytes/s adds about
// wire / b.

#include <cstdint>
#include <functional>
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
#include "evenkeel/bucket/hooks/compressed_reduction.h"
#include "evenkeel/bucket/hooks/power_sgd.h"
#include "evenkeel/bucket/hooks/quantized_all_reduce.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/tcp/tcp.h"

namespace evenkeel {
namespace {

constexpr int kParams = 8;
constexpr int kRows = 256, kCols = 1024;
constexpr int kSteps = 5;

struct Model {
  Model() : values(kParams, std::vector<float>(kRows * kCols, 1.0f)), grads(values) {
    for (int p = 0; p < kParams; ++p) {
      for (int j = 0; j < kRows * kCols; ++j)
        grads[p][j] = static_cast<float>((j * 31 + p) % 97) - 48.0f;
      params.Add(absl::StrCat("p", p), absl::MakeSpan(values[p]), absl::MakeSpan(grads[p]));
    }
  }
  std::vector<std::vector<float>> values, grads;
  ParameterSet params;
};

using Maker = std::function<std::unique_ptr<BucketReduction>()>;

std::unique_ptr<BucketReduction> MakePowerSgd(int rank) {
  return std::make_unique<PowerSgd>(PowerSgdOptions{
      .shapes = std::vector<MatrixShape>(kParams, MatrixOf({kRows, kCols})), .rank = rank});
}

absl::Status Steps(DataParallel& ddp, ParameterSet& params) {
  for (int step = 0; step < kSteps; ++step) {
    params.ClearGradients();
    EK_RETURN_IF_ERROR(ddp.BeginStep());
    for (int p = kParams - 1; p >= 0; --p) {
      params.SetGradState(p, GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp.GradientReady(p));
    }
    EK_RETURN_IF_ERROR(ddp.FinishStep());
  }
  return absl::OkStatus();
}

void BM_Step(benchmark::State& state, const Maker& make, bool over_tcp) {
  int64_t wire = 0;
  for (auto _ : state) {
    absl::Duration time;
    const auto body = [&](Communicator& comm) -> absl::Status {
      Model model;
      EK_ASSIGN_OR_RETURN(auto ddp,
                          DataParallel::Create(&comm, &model.params, {},
                                               {.reducer = {.caps = {Bytes{2 << 20}}}}, make()));
      EK_RETURN_IF_ERROR(Steps(*ddp, model.params));  // Past the rebuild.
      const absl::Time start = absl::Now();
      EK_RETURN_IF_ERROR(Steps(*ddp, model.params));
      if (comm.rank() != 0) return absl::OkStatus();
      time = absl::Now() - start;
      wire = 0;
      for (const Collective& what : ddp->reducer().schedule().entries) {
        wire +=
            what.count *
            SizeOf(
                what.dtype);  // So much each of two ranks sends to the other, in any of the kinds.
      }
      return absl::OkStatus();
    };
    const auto group = over_tcp ? CreateTcpGroupInProcess(2) : CreateLocalGroup(2);
    const absl::Status status = group.ok() ? internal::RunGroup(*group, body) : group.status();
    if (!status.ok()) state.SkipWithError(std::string(status.message()).c_str());
    state.SetIterationTime(absl::ToDoubleSeconds(time));
  }
  state.counters["step"] = benchmark::Counter(
      kSteps, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
  state.counters["wire"] = benchmark::Counter(
      static_cast<double>(wire), benchmark::Counter::kDefaults, benchmark::Counter::kIs1024);
}

const int kRegistered = [] {
  const std::pair<const char*, Maker> hooks[] = {
      {"all_reduce", [] { return std::unique_ptr<BucketReduction>(); }},
      {"float16", [] { return std::make_unique<CompressedReduction>(DType::kFloat16); }},
      {"bfloat16", [] { return std::make_unique<CompressedReduction>(DType::kBFloat16); }},
      {"int8", [] { return std::make_unique<QuantizedAllReduce>(); }},
      {"power_sgd_1", [] { return MakePowerSgd(1); }},
      {"power_sgd_4", [] { return MakePowerSgd(4); }},
  };
  for (const bool over_tcp : {false, true}) {
    for (const auto& [name, make] : hooks) {
      benchmark::RegisterBenchmark(
          absl::StrCat("BM_Step/", over_tcp ? "tcp/" : "local/", name).c_str(),
          [make = make, over_tcp](benchmark::State& state) { BM_Step(state, make, over_tcp); })
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond);
    }
  }
  return 0;
}();

}  // namespace
}  // namespace evenkeel
