// Measures the growth of the work beside the arithmetic: of planning and bookkeeping with the
// number of parameters, of the control plane with the number of ranks. See --help.

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/rendezvous/tcp_store.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/tools/measure/paired_ratio.h"
#include "evenkeel/tools/measure/power_law.h"
#include "evenkeel/tools/measure/rank_job.h"
#include "evenkeel/tools/measure/table.h"
#include "evenkeel/tools/program.h"
#include "gflags/gflags.h"
#include "nlohmann/json.hpp"

DEFINE_int32(max_params, 1'000'000, "From 100 in powers of ten to this.");
DEFINE_int32(max_ranks, 64, "From 2 in powers of two to this.");
DEFINE_int32(agreements, 200, "Of a measurement of the control plane.");
DEFINE_double(bar, 1.2, "The largest exponent that counts as linear.");
DEFINE_string(json, "", "Everything, as JSON, into this file.");

namespace evenkeel {
namespace {

constexpr char kUsage[] = R"(How planning, the reducer's bookkeeping and the control plane grow.

  bazel run //tools:bench_scaling

Each row has times for growing numbers of parameters or ranks, and the exponent that fits those from 1000 parameters or
4 ranks on: 1 is linear, less is better. Where the memory that is touched outgrows a cache, linear work takes more than
linear time; the bar leaves room for that. Ranks are threads that share this machine's cores, so the time of an
agreement is the work of all ranks over the cores.)";

// Something that is measured at several sizes.
struct Series {
  std::string name;
  std::string per;  // "parameter", "rank"
  std::vector<double> sizes, seconds;

  // Without the first size, of which constant costs are a large part.
  double exponent() const {
    return ExponentOf(std::span(sizes).subspan(1), std::span(seconds).subspan(1));
  }
};

double Since(absl::Time start) { return absl::ToDoubleSeconds(SteadyNow() - start); }

// The median of some calls, fewer of those that take long.
double TimeOf(const std::function<void()>& call) {
  std::vector<double> seconds;
  const absl::Time begin = SteadyNow();
  while (seconds.size() < 3 || (seconds.size() < 1000 && Since(begin) < 0.1)) {
    const absl::Time start = SteadyNow();
    call();
    seconds.push_back(Since(start));
  }
  return MedianOf(seconds);
}

std::vector<int> ParameterCounts() {
  std::vector<int> counts;
  for (int count = 100; count <= FLAGS_max_params; count *= 10) counts.push_back(count);
  return counts;
}

// Planning ----------------------------------------------------------------------------------------

std::vector<Series> MeasurePlanner() {
  Series registered{"plan, order of registration", "parameter"},
      ready{"plan, gradient-ready order", "parameter"}, random{"plan, random order", "parameter"};
  for (const int count : ParameterCounts()) {
    std::mt19937 numbers(7);
    std::vector<ParamSpec> params(count);
    for (ParamSpec& param : params) param = {.count = 1 + static_cast<int64_t>(numbers() % 1000)};
    std::vector<int> order(count);
    std::iota(order.rbegin(), order.rend(), 0);
    PlanOptions in_order{.order = order};
    std::shuffle(order.begin(), order.end(), numbers);
    const auto measure = [&](Series& series, const PlanOptions& options) {
      series.sizes.push_back(count);
      series.seconds.push_back(TimeOf([&] {
        if (!PlanBuckets(params, options).ok()) std::abort();
      }));
    };
    measure(registered, {});
    measure(ready, in_order);
    measure(random, {.order = order});
  }
  return {registered, ready, random};
}

// Bookkeeping -------------------------------------------------------------------------------------

constexpr int64_t kElements = 4;  // Per parameter: next to nothing to copy.

class EmptyModel {
 public:
  explicit EmptyModel(int count) : values_(count * kElements), gradients_(count * kElements) {
    for (int i = 0; i < count; ++i) {
      params_.Add(absl::StrCat("p", i), absl::MakeSpan(values_).subspan(i * kElements, kElements),
                  absl::MakeSpan(gradients_).subspan(i * kElements, kElements));
    }
  }
  ParameterSet& params() { return params_; }

  struct Times {
    double begin = 0, announce = 0;
  };
  absl::StatusOr<Times> Step(DataParallel& ddp) {
    Times times;
    params_.ClearGradients();
    const absl::Time start = SteadyNow();
    EK_RETURN_IF_ERROR(ddp.BeginStep());
    const absl::Time begun = SteadyNow();
    for (int i = params_.size() - 1; i >= 0; --i) {
      if (!params_.trainable(i)) continue;
      params_.SetGradState(i, GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp.GradientReady(i));
    }
    const absl::Time announced = SteadyNow();
    EK_RETURN_IF_ERROR(ddp.FinishStep());
    times.begin = absl::ToDoubleSeconds(begun - start);
    times.announce = absl::ToDoubleSeconds(announced - begun);
    return times;
  }

 private:
  std::vector<float> values_, gradients_;
  ParameterSet params_;
};

// On one rank, so that nothing is waited for.
absl::StatusOr<std::vector<Series>> MeasureReducer() {
  enum { kReady, kRebuild, kRefresh, kParts };
  std::vector<Series> all = {{"reducer, GradientReady()", "parameter"},
                             {"reducer, BeginStep() that rebuilds", "parameter"},
                             {"reducer, BeginStep() after freezing half", "parameter"}};
  for (const int count : ParameterCounts()) {
    EK_RETURN_IF_ERROR(RunRanks(1, [&](Communicator& comm) -> absl::Status {
      EmptyModel model(count);
      DataParallelOptions options;
      options.trainability.warn_on_change = false;
      std::vector<double> seconds[kParts];
      const absl::Time begin = SteadyNow();
      while (seconds[kRebuild].size() < 3 ||
             (seconds[kRebuild].size() < 100 && Since(begin) < 0.3)) {
        model.params().SetTrainable("p", true);
        EK_ASSIGN_OR_RETURN(const auto ddp,
                            DataParallel::Create(&comm, &model.params(), {}, options));
        EK_RETURN_IF_ERROR(model.Step(*ddp).status());
        EK_ASSIGN_OR_RETURN(const EmptyModel::Times second, model.Step(*ddp));
        seconds[kRebuild].push_back(second.begin);
        for (int step = 0; step < 3; ++step) {
          EK_ASSIGN_OR_RETURN(const EmptyModel::Times times, model.Step(*ddp));
          seconds[kReady].push_back(times.announce);
        }
        for (int i = 0; i < count; i += 2) model.params().SetTrainable(i, false);
        EK_ASSIGN_OR_RETURN(const EmptyModel::Times frozen, model.Step(*ddp));
        seconds[kRefresh].push_back(frozen.begin);
      }
      for (int part = 0; part < kParts; ++part) {
        all[part].sizes.push_back(count);
        all[part].seconds.push_back(MedianOf(seconds[part]));
      }
      return absl::OkStatus();
    }));
  }
  return all;
}

// The control plane -------------------------------------------------------------------------------

double CpuSeconds() {
  rusage used = {};
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

struct Agreements {
  double seconds = 0;  // Per agreement,
  double cpu = 0;      // and the processor time of all ranks for it.
};

// Measures calls of `agree` on this rank, after some that warm up.
absl::StatusOr<Agreements> Measure(absl::FunctionRef<absl::Status()> agree) {
  for (int i = 0; i < 10; ++i) EK_RETURN_IF_ERROR(agree());
  const double cpu = CpuSeconds();
  const absl::Time start = SteadyNow();
  for (int i = 0; i < FLAGS_agreements; ++i) EK_RETURN_IF_ERROR(agree());
  return Agreements{.seconds = Since(start) / FLAGS_agreements,
                    .cpu = (CpuSeconds() - cpu) / FLAGS_agreements};
}

class Participant : public StepParticipant {
 public:
  const std::string& participant_name() const override { return name_; }
  absl::StatusOr<ParticipantState> PrepareStep() override {
    return ParticipantState{.generation = 1};
  }
  ParticipantState CurrentState() const override { return {.generation = 1}; }
  std::string ExportState() const override { return ""; }
  absl::Status ImportState(absl::string_view) override { return absl::OkStatus(); }

 private:
  const std::string name_ = "participant";
};

// Step records over links in memory, as a training step with one participant sends them.
absl::StatusOr<Agreements> AgreeInMemory(int ranks) {
  Agreements result;
  EK_RETURN_IF_ERROR(RunRanks(ranks, [&](Communicator& comm) -> absl::Status {
    Participant participant;
    StepControl& steps = StepControl::Of(comm);
    steps.Register(&participant);
    const auto agree = [&]() -> absl::Status {
      EK_ASSIGN_OR_RETURN(const std::shared_ptr<StepTicket> ticket, steps.Enter("participant", 0));
      return ticket->Wait().status();
    };
    EK_ASSIGN_OR_RETURN(const Agreements mine, Measure(agree));
    if (comm.rank() == 0) result = mine;
    steps.Unregister(&participant);
    return absl::OkStatus();
  }));
  return result;
}

// The same bytes over sockets, without what is made of them.
absl::StatusOr<Agreements> ExchangeOverTcp(int ranks) {
  EK_ASSIGN_OR_RETURN(const auto server,
                      TcpStoreServer::Create({.secret = "scaling", .world_size = ranks}));
  std::vector<absl::Status> statuses(ranks);
  Agreements result;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      statuses[rank] = [&]() -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto link, TcpControlLink::Connect({.addresses = {server->address()},
                                                                .secret = "scaling",
                                                                .rank = rank,
                                                                .world_size = ranks}));
        ControlChannel channel(rank, ranks, std::move(link));
        const std::string record =
            StepRecord{.participants = {ParticipantState{.generation = 1}}}.Serialize();
        const auto exchange = [&] {
          return channel.Exchange("record", record, absl::Minutes(1)).status();
        };
        EK_ASSIGN_OR_RETURN(const Agreements mine, Measure(exchange));
        if (rank == 0) result = mine;
        EK_RETURN_IF_ERROR(exchange());  // Nobody leaves before all have measured.
        channel.Leave();
        return absl::OkStatus();
      }();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) EK_RETURN_IF_ERROR(status);
  return result;
}

absl::StatusOr<std::vector<Series>> MeasureControl(
    const std::string& name, const std::function<absl::StatusOr<Agreements>(int)>& measure) {
  Series seconds{name, "rank"}, cpu{name + ", processor time", "rank"};
  for (int ranks = 2; ranks <= FLAGS_max_ranks; ranks *= 2) {
    EK_ASSIGN_OR_RETURN(const Agreements agreements, measure(ranks));
    for (Series* series : {&seconds, &cpu}) series->sizes.push_back(ranks);
    seconds.seconds.push_back(agreements.seconds);
    cpu.seconds.push_back(agreements.cpu);
  }
  return std::vector<Series>{seconds, cpu};
}

// Report ------------------------------------------------------------------------------------------

std::string FormatTime(double seconds) {
  return seconds < 1e-6   ? absl::StrFormat("%.1f ns", 1e9 * seconds)
         : seconds < 1e-3 ? absl::StrFormat("%.1f us", 1e6 * seconds)
                          : absl::StrFormat("%.1f ms", 1e3 * seconds);
}

void Print(const Series& series) {
  std::cout << absl::StrFormat("%-42s exponent %5.2f  %s\n", series.name, series.exponent(),
                               series.exponent() <= FLAGS_bar ? "ok" : "WORSE THAN LINEAR");
  const Table table({{"", 11}, {"", -11}, {"", 9}, {"", 9}, {"", 0}});
  for (size_t i = 0; i < series.sizes.size(); ++i) {
    std::cout << table.Line({absl::StrFormat("%.0f", series.sizes[i]),
                             series.per + "s:", FormatTime(series.seconds[i]),
                             FormatTime(series.seconds[i] / series.sizes[i]), "per " + series.per});
  }
}

nlohmann::json ToJson(const Series& series) {
  return {{"name", series.name},           {"per", series.per},
          {"sizes", series.sizes},         {"seconds", series.seconds},
          {"exponent", series.exponent()}, {"is_linear", series.exponent() <= FLAGS_bar}};
}

absl::StatusOr<int> Main(int argc, char** argv) {
  EK_RETURN_IF_ERROR(ParseFlags(kUsage, argc, argv));
  if (FLAGS_max_params < 1000 || FLAGS_max_ranks < 4 || FLAGS_agreements < 1) {
    return absl::InvalidArgumentError(
        "--max_params must be at least 1000, --max_ranks 4 and --agreements 1");
  }
  nlohmann::json rows = nlohmann::json::array();
  const auto report = [&](const std::vector<Series>& all) {
    for (const Series& series : all) {
      Print(series);
      rows.push_back(ToJson(series));
    }
  };
  report(MeasurePlanner());
  EK_ASSIGN_OR_RETURN(const std::vector<Series> reducer, MeasureReducer());
  report(reducer);
  EK_ASSIGN_OR_RETURN(const std::vector<Series> memory,
                      MeasureControl("agreement in memory", AgreeInMemory));
  report(memory);
  EK_ASSIGN_OR_RETURN(const std::vector<Series> tcp,
                      MeasureControl("exchange over TCP", ExchangeOverTcp));
  report(tcp);
  if (!FLAGS_json.empty())
    EK_RETURN_IF_ERROR(WriteJson(FLAGS_json, nlohmann::json{{"rows", rows}}));
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  return evenkeel::RunProgram([&] { return evenkeel::Main(argc, argv); });
}
