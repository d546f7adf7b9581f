// Measures the cost of agreement per step: a plan of a GPT's size over two ranks, with and without.
//
//   bazel run //tests/cost -- --backend=tcp --pairs=40
//
// A step is the one of a GPT with 4 layers of width 128 (0.84 M parameters, their real shapes):
// forward and backward do arithmetic of a fixed amount per parameter in place of the products, 50
// ms in all, and announce each gradient as a real backward does; then SGD. The two things to
// compare run in blocks in turn, so that what the machine does meanwhile hits both; the ratio is
// the median over pairs of blocks with its 95 % interval. Counters are exact.
//
// Each rank is a thread of this process, with threads of its own for communication, as a process
// would have.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/tcp/tcp.h"
#include "evenkeel/comm/verify.h"
#include "evenkeel/join/join.h"
#include "evenkeel/tools/measure/paired_ratio.h"
#include "evenkeel/tools/measure/rounds.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gflags/gflags.h"
#include "nlohmann/json.hpp"

DEFINE_string(backend, "tcp", "tcp or local.");
DEFINE_int32(world, 2, "How many ranks.");
DEFINE_int32(
    pairs, 40,
    "How many pairs of blocks for each comparison; at least 30 for a figure to be quoted.");
DEFINE_int32(steps, 4, "Steps of a block.");
DEFINE_double(step_ms, 50, "Arithmetic of a step.");
DEFINE_bool(json, false, "One JSON object in place of the table.");

namespace evenkeel {
namespace {

// Arithmetic that depends on itself, so that it can't be left out.
class Arithmetic {
 public:
  void Run(int64_t rounds) {
    for (int64_t round = 0; round < rounds; ++round) {
      for (float& x : lanes_) x = x * 0.999f + 0.001f;
    }
  }
  // Rounds that take so long on a core of its own.
  int64_t RoundsFor(absl::Duration time) {
    constexpr int64_t kRounds = 1 << 17;
    absl::Duration best = absl::InfiniteDuration();
    for (int i = 0; i < 5; ++i) {
      const absl::Time start = absl::Now();
      Run(kRounds);
      best = std::min(best, absl::Now() - start);
    }
    return static_cast<int64_t>(kRounds * absl::FDivDuration(time, best));
  }

 private:
  float lanes_[64] = {};
};

// Returns the elements of a GPT's tensors, in the order of its modules: 4 layers of width 128, a
// vocabulary of 256 and a context of 128.
std::vector<int64_t> SizesOfGpt() {
  constexpr int64_t kWidth = 128;
  std::vector<int64_t> sizes = {256 * kWidth, 128 * kWidth};
  for (int layer = 0; layer < 4; ++layer) {
    // Norm, attention's two products, norm, and the two of the layer's network: weights and biases.
    for (const int64_t rows :
         {int64_t{1}, int64_t{1}, 3 * kWidth, int64_t{3}, kWidth, int64_t{1}, int64_t{1},
          int64_t{1}, 4 * kWidth, int64_t{4}, 4 * kWidth, int64_t{1}})
      sizes.push_back(rows * kWidth);
  }
  sizes.insert(sizes.end(), {kWidth, kWidth});
  return sizes;
}

class Model {
 public:
  explicit Model(int64_t rounds) {
    const std::vector<int64_t> sizes = SizesOfGpt();
    const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    for (const int64_t size : sizes) {
      values_.emplace_back(size, 0.5f);
      grads_.emplace_back(size, 0.25f);
      rounds_.push_back(rounds * size / total);
    }
    for (size_t p = 0; p < sizes.size(); ++p) {
      params_.Add(absl::StrCat("tensor", p), absl::MakeSpan(values_[p]), absl::MakeSpan(grads_[p]));
    }
  }
  ParameterSet& params() { return params_; }

  // A third of the arithmetic is the forward's.
  void Forward() {
    for (const int64_t rounds : rounds_) arithmetic_.Run(rounds / 3);
  }
  absl::Status Backward(DataParallel& ddp) {
    for (int p = params_.size() - 1; p >= 0; --p) {
      arithmetic_.Run(rounds_[p] * 2 / 3);
      params_.SetGradState(p, GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp.GradientReady(p));
    }
    return absl::OkStatus();
  }

 private:
  std::vector<std::vector<float>> values_, grads_;
  std::vector<int64_t> rounds_;
  ParameterSet params_;
  Arithmetic arithmetic_;
};

// One rank.
class Trainer {
 public:
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(Communicator& comm, int64_t rounds) {
    auto trainer = std::make_unique<Trainer>(comm, rounds);
    EK_ASSIGN_OR_RETURN(trainer->ddp_, DataParallel::Create(&comm, &trainer->model_.params(), {}));
    EK_ASSIGN_OR_RETURN(trainer->optimizer_,
                        Optimizer::Create(comm, trainer->model_.params(), Sgd{.momentum = 0.9}));
    return trainer;
  }
  Trainer(Communicator& comm, int64_t rounds) : comm_(comm), model_(rounds) {}

  Communicator& comm() { return comm_; }

  absl::Status Steps() {
    for (int step = 0; step < FLAGS_steps; ++step) {
      model_.params().ClearGradients();
      EK_RETURN_IF_ERROR(ddp_->BeginStep());
      model_.Forward();
      EK_RETURN_IF_ERROR(model_.Backward(*ddp_));
      EK_RETURN_IF_ERROR(ddp_->FinishStep());
      EK_RETURN_IF_ERROR(optimizer_->Step());
    }
    return absl::OkStatus();
  }
  absl::Status JoinedSteps() {
    return RunJoined({ddp_.get(), optimizer_.get()}, {}, [this](JoinScope&) { return Steps(); });
  }

 private:
  Communicator& comm_;
  Model model_;
  std::unique_ptr<DataParallel> ddp_;
  std::unique_ptr<Optimizer> optimizer_;
};

// One way to run a block of steps; `prepare` is not timed.
struct Side {
  std::function<absl::Status(Trainer&)> prepare;
  std::function<absl::Status(Trainer&)> run;
};

absl::StatusOr<double> TimeOf(Trainer& trainer, const Side& side) {
  EK_RETURN_IF_ERROR(side.prepare(trainer));
  EK_RETURN_IF_ERROR(
      trainer.comm().control().Exchange("cost", "", trainer.comm().timeout()).status());
  const absl::Time start = absl::Now();
  EK_RETURN_IF_ERROR(side.run(trainer));
  return absl::ToDoubleSeconds(absl::Now() - start);
}

absl::StatusOr<PairedRatio> Compare(Trainer& trainer, const Side& a, const Side& b) {
  std::vector<double> times[2];
  EK_RETURN_IF_ERROR(RunRounds(2, 1 + FLAGS_pairs, [&](size_t i, int round) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const double seconds, TimeOf(trainer, i == 0 ? a : b));
    if (round > 0) times[i].push_back(seconds);  // The first round warms up.
    return absl::OkStatus();
  }));
  return RatioOf(times[0], times[1]);
}

Side AtLevel(VerifyLevel level) {
  return {.prepare = [level](Trainer& trainer) { return trainer.comm().SetVerifyLevel(level); },
          .run = [](Trainer& trainer) { return trainer.Steps(); }};
}

Side Joined(bool is_joined) {
  return {
      .prepare =
          [](Trainer& trainer) { return trainer.comm().SetVerifyLevel(VerifyLevel::kPositions); },
      .run = [is_joined](
                 Trainer& trainer) { return is_joined ? trainer.JoinedSteps() : trainer.Steps(); }};
}

struct Counted {
  double control_messages = 0;  // Per rank and step.
  double control_bytes = 0;
  double collectives = 0;
  absl::Duration control_cpu;
};

// Returns the control thread's counters, once they include the message that woke up this thread.
ControlCounters Settled(Trainer& trainer) {
  absl::SleepFor(absl::Milliseconds(20));
  return trainer.comm().control().link().Counters();
}

absl::StatusOr<Counted> Count(Trainer& trainer) {
  EK_RETURN_IF_ERROR(trainer.comm().SetVerifyLevel(VerifyLevel::kPositions));
  const ControlCounters before = Settled(trainer);
  const int64_t issued = trainer.comm().flight().issued();
  constexpr int kBlocks = 10;
  for (int i = 0; i < kBlocks; ++i) EK_RETURN_IF_ERROR(trainer.Steps());
  const ControlCounters after = Settled(trainer);
  const double steps = kBlocks * FLAGS_steps;
  return Counted{.control_messages = (after.messages_sent - before.messages_sent +
                                      after.messages_received - before.messages_received) /
                                     steps,
                 .control_bytes = (after.bytes_sent - before.bytes_sent + after.bytes_received -
                                   before.bytes_received) /
                                  steps,
                 .collectives = (trainer.comm().flight().issued() - issued) / steps,
                 .control_cpu = (after.cpu_time - before.cpu_time) / steps};
}

struct Row {
  std::string name;
  PairedRatio ratio;
  double bar;  // The interval's upper end may not be above it.
};

struct Report {
  std::vector<Row> rows;
  Counted counted;
};

absl::StatusOr<Report> Measure(Communicator& comm, int64_t rounds) {
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Trainer> trainer, Trainer::Create(comm, rounds));
  EK_RETURN_IF_ERROR(trainer->Steps());  // Past the rebuild of the buckets.
  Report report;
  const Side off = AtLevel(VerifyLevel::kOff);
  EK_ASSIGN_OR_RETURN(const PairedRatio positions,
                      Compare(*trainer, AtLevel(VerifyLevel::kPositions), off));
  EK_ASSIGN_OR_RETURN(const PairedRatio every,
                      Compare(*trainer, AtLevel(VerifyLevel::kEvery), off));
  EK_ASSIGN_OR_RETURN(const PairedRatio join, Compare(*trainer, Joined(true), Joined(false)));
  EK_ASSIGN_OR_RETURN(report.counted, Count(*trainer));
  report.rows = {{"verify: positions / off", positions, 1.03},
                 {"verify: every / off", every, 1.10},
                 {"join with even inputs / no join", join, 1.03}};
  return report;
}

void Print(const Report& report) {
  std::cout << absl::StrFormat("%s, %d ranks, %.0f ms of arithmetic a step, blocks of %d steps\n\n",
                               FLAGS_backend, FLAGS_world, FLAGS_step_ms, FLAGS_steps);
  for (const Row& row : report.rows) {
    std::cout << absl::StrFormat("%-34s %s  (bar %.2f)\n", row.name, row.ratio.ToString(), row.bar);
  }
  const Counted& counted = report.counted;
  std::cout << absl::StrFormat(
      "\nper step and rank: %.2f control messages, %.0f bytes of them, %.2f collectives, %.1f us "
      "of "
      "the control thread\n",
      counted.control_messages, counted.control_bytes, counted.collectives,
      absl::ToDoubleMicroseconds(counted.control_cpu));
}

void PrintJson(const Report& report) {
  nlohmann::json json = {
      {"backend", FLAGS_backend},
      {"world", FLAGS_world},
      {"step_ms", FLAGS_step_ms},
      {"control_messages_per_step", report.counted.control_messages},
      {"control_bytes_per_step", report.counted.control_bytes},
      {"collectives_per_step", report.counted.collectives},
      {"control_cpu_us_per_step", absl::ToDoubleMicroseconds(report.counted.control_cpu)}};
  for (const Row& row : report.rows) {
    json["ratios"].push_back({{"name", row.name},
                              {"median", row.ratio.median},
                              {"low", row.ratio.low},
                              {"high", row.ratio.high},
                              {"pairs", row.ratio.pairs},
                              {"bar", row.bar}});
  }
  std::cout << json.dump() << "\n";
}

absl::Status Main() {
  if (FLAGS_world < 1 || FLAGS_pairs < 1 || FLAGS_steps < 1 || !(FLAGS_step_ms > 0)) {
    return absl::InvalidArgumentError("--world, --pairs, --steps and --step_ms must be at least 1");
  }
  if (FLAGS_backend != "tcp" && FLAGS_backend != "local") {
    return absl::InvalidArgumentError(
        absl::StrCat("--backend=", FLAGS_backend, ": it is tcp or local"));
  }
  const int64_t rounds = Arithmetic().RoundsFor(absl::Milliseconds(FLAGS_step_ms));
  EK_ASSIGN_OR_RETURN(std::vector<std::unique_ptr<Communicator>> group,
                      FLAGS_backend == "tcp" ? CreateTcpGroupInProcess(FLAGS_world)
                                             : CreateLocalGroup(FLAGS_world));
  Report report;
  EK_RETURN_IF_ERROR(internal::RunGroup(group, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(Report mine, Measure(comm, rounds));
    if (comm.rank() == 0) report = std::move(mine);
    return absl::OkStatus();
  }));
  FLAGS_json ? PrintJson(report) : Print(report);
  return absl::OkStatus();
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  gflags::SetUsageMessage("What agreement costs a training step; see tests/cost/cost.cc.");
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  const absl::Status status = evenkeel::Main();
  if (status.ok()) return 0;
  std::cerr << "cost: " << status.message() << "\n";
  return 1;
}
