// A random program: consecutive loops with uneven inputs, some of them trainings, with collectives
// in them; some ranks are late, and some wait where others do not. The program is correct, so every
// rank must end without an error and with the right numbers, unless a rank is lost. A program may
// have a training on ranks of changing speed in place of the loops.

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/join/testing/ticker.h"
#include "evenkeel/tests/rank_report.h"
#include "evenkeel/tests/simulation/balanced_training.h"
#include "evenkeel/tests/simulation/loss.h"
#include "evenkeel/tests/simulation/play.h"
#include "evenkeel/tests/toy_training.h"

namespace evenkeel::simulation {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(12);
// In each step of a large group some rank is late by seconds, and a rank that waits for no step may
// be a loop ahead of those that wait for each.
constexpr int kLargeGroup = 16;
constexpr absl::Duration kTimeoutInLargeGroup = absl::Seconds(40);
constexpr absl::Duration kBeat = absl::Milliseconds(250), kSilence = absl::Milliseconds(1500);
// The limit of the time from the detection of a loss, at the latest after kSilence, to the end of
// all other ranks.
constexpr Nanos kSoon = 3 * kSecond;

// Longer than a rank is stopped that continues.
constexpr absl::Duration kLongStop = absl::Seconds(5);
constexpr float kGivenBack = -7;

// A collective that all ranks with inputs issue.
struct Call {
  enum class Kind { kAllReduce, kBroadcast, kAllGather, kBarrier };
  Kind kind = Kind::kAllReduce;
  int count = 0;
};

struct Loop {
  bool trains = false;      // False: its steps do nothing.
  bool waits = false;       // If its steps do nothing, they wait for all ranks.
  std::vector<int> inputs;  // By rank.
  // By step: the calls that ranks issue before it and within it. The last call comes after the
  // loop, and only from the ranks with the most inputs: the others are exhausted by then.
  std::vector<std::optional<Call>> before, within;
  std::set<int> waiting;  // Ranks that wait for the answer to each of their steps.
  bool is_sharded = false;
  ToyList list = ToyList::kGradientsFirst;

  int most() const { return *std::max_element(inputs.begin(), inputs.end()); }
};

struct Program {
  int world_size = 0;
  std::vector<Loop> loops;
  std::optional<BalancedTraining> balanced;  // Without loops.
  bool rank0_hosts = false;
  std::optional<LossKind> loss;
  int victim = 0;
  Nanos when = 0;
};

std::optional<Call> DrawCall(Draws& draws) {
  if (draws.OneIn(2)) return std::nullopt;
  constexpr int kCounts[] = {0, 1, 100, 6000};
  return Call{static_cast<Call::Kind>(draws.Below(4)), kCounts[draws.Below(4)]};
}

Loop DrawLoop(Draws& draws, int world_size, bool may_train) {
  Loop loop{.trains = may_train && draws.OneIn(2), .waits = draws.OneIn(3)};
  const int most = draws.Below(5);
  for (int rank = 0; rank < world_size; ++rank)
    loop.inputs.push_back(draws.OneIn(2) ? most : draws.Below(most + 1));
  // A training needs a step, and some rank must have the most inputs.
  loop.inputs[draws.Below(world_size)] = std::max(most, loop.trains ? 1 : 0);
  for (int step = 0; step <= loop.most(); ++step) {
    loop.before.push_back(DrawCall(draws));
    loop.within.push_back(draws.OneIn(2) ? DrawCall(draws) : std::nullopt);
  }
  for (int rank = 0; rank < world_size; ++rank) {
    if (draws.OneIn(4)) loop.waiting.insert(rank);
  }
  loop.is_sharded = draws.OneIn(2);
  loop.list = draws.OneIn(3) ? ToyList::kOptimizerFirst : ToyList::kGradientsFirst;
  if (world_size <= kMostConnected) return loop;
  for (int step = 0; step <= loop.most(); ++step) loop.before[step] = loop.within[step] = {};
  return loop;
}

void DrawLoss(Draws& draws, Program& program) {
  if (draws.OneIn(2)) return;
  program.loss = static_cast<LossKind>(draws.Below(kLossKinds));
  program.victim = draws.Below(program.world_size);
  if (program.loss == LossKind::kStoreStoppedForAWhile) program.rank0_hosts = false;
  program.when = draws.Magnitude(kMillisecond, 2 * kSecond);
}

Program DrawProgram(Draws& draws, int world_size) {
  Program program{.world_size = world_size};
  const int loops = 1 + draws.Below(3);
  for (int i = 0; i < loops; ++i) {
    const bool has_trained = std::any_of(program.loops.begin(), program.loops.end(),
                                         [](const Loop& l) { return l.trains; });
    const bool may_train = !has_trained && world_size <= kMostConnected;
    program.loops.push_back(DrawLoop(draws, world_size, may_train));
  }
  program.rank0_hosts = draws.OneIn(3);
  DrawLoss(draws, program);
  return program;
}

// "3,3,1", or of many ranks "40 x 3,24 x 1".
std::string Inputs(const Loop& loop) {
  constexpr size_t kMostListed = 16;
  if (loop.inputs.size() <= kMostListed) return absl::StrJoin(loop.inputs, ",");
  std::map<int, int> ranks;  // By the number of inputs.
  for (const int inputs : loop.inputs) ++ranks[inputs];
  return absl::StrJoin(ranks, ",", [](std::string* out, const auto& entry) {
    absl::StrAppend(out, entry.second, " x ", entry.first);
  });
}

void RemoveRank(Program& program, int rank) {
  --program.world_size;
  if (program.victim > rank) --program.victim;
  if (program.balanced.has_value())
    program.balanced->ranks.erase(program.balanced->ranks.begin() + rank);
  for (Loop& loop : program.loops) {
    loop.inputs.erase(loop.inputs.begin() + rank);
    std::set<int> waiting;
    for (const int waiter : loop.waiting) {
      if (waiter != rank) waiting.insert(waiter > rank ? waiter - 1 : waiter);
    }
    loop.waiting = std::move(waiting);
  }
}

class ProgramPlay : public Play {
 public:
  ProgramPlay(uint64_t seed, Program program)
      : seed_(seed), program_(std::move(program)), ends_(program_.world_size) {
    if (program_.balanced.has_value()) balanced_.emplace(*program_.balanced);
  }

  std::string Describe() const override {
    std::string text = absl::StrCat(world_size(), " ranks",
                                    program_.rank0_hosts ? ", rank 0 hosts the store" : "");
    for (const Loop& loop : program_.loops) {
      const auto calls = [](const std::vector<std::optional<Call>>& list) {
        return std::count_if(list.begin(), list.end(), [](const auto& c) { return c.has_value(); });
      };
      absl::StrAppend(&text, "; ", loop.trains ? "trains " : "ticks ", Inputs(loop),
                      loop.trains && loop.is_sharded ? " sharded" : "", ", ",
                      calls(loop.before) + calls(loop.within), " calls");
    }
    if (program_.balanced.has_value())
      absl::StrAppend(&text, "; ", simulation::Describe(*program_.balanced));
    if (!program_.loss.has_value()) return text;
    return absl::StrCat(text, "; rank ", program_.victim, " ", TextOf(*program_.loss), " at ",
                        absl::FormatDuration(absl::Nanoseconds(program_.when)));
  }
  int world_size() const override { return program_.world_size; }
  bool rank0_hosts() const override { return program_.rank0_hosts; }
  bool moves_data() const override { return world_size() <= kMostConnected; }
  CommunicatorOptions options() const override {
    return {.timeout = world_size() < kLargeGroup ? kTimeout : kTimeoutInLargeGroup,
            .watch = {.beat = kBeat, .silence = kSilence}};
  }

  std::vector<std::unique_ptr<Play>> Simpler() const override {
    std::vector<std::unique_ptr<Play>> simpler;
    const auto with = [&](const std::function<void(Program&)>& change) {
      Program next = program_;
      change(next);
      const bool is_possible =
          std::all_of(next.loops.begin(), next.loops.end(),
                      [](const Loop& loop) { return !loop.trains || loop.most() > 0; });
      if (is_possible) simpler.push_back(std::make_unique<ProgramPlay>(seed_, std::move(next)));
    };
    if (program_.loss.has_value()) with([](Program& next) { next.loss.reset(); });
    for (int rank = 0; rank < world_size() && world_size() > 2; ++rank) {
      if (program_.loss.has_value() && rank == program_.victim) continue;
      with([rank](Program& next) { RemoveRank(next, rank); });
    }
    for (size_t i = 0; i < program_.loops.size(); ++i) {
      const Loop& loop = program_.loops[i];
      if (program_.loops.size() > 1)
        with([i](Program& next) { next.loops.erase(next.loops.begin() + static_cast<int>(i)); });
      if (loop.is_sharded) with([i](Program& next) { next.loops[i].is_sharded = false; });
      if (!loop.waiting.empty()) with([i](Program& next) { next.loops[i].waiting.clear(); });
      if (loop.waits) with([i](Program& next) { next.loops[i].waits = false; });
      for (size_t step = 0; step < loop.before.size(); ++step) {
        if (loop.before[step].has_value())
          with([i, step](Program& next) { next.loops[i].before[step].reset(); });
        if (loop.within[step].has_value())
          with([i, step](Program& next) { next.loops[i].within[step].reset(); });
      }
    }
    return simpler;
  }

  void Prepare(Stage& stage) override {
    if (!program_.loss.has_value()) return;
    Schedule(stage, program_.victim, program_.when, [this, &stage] {
      if (ends_[program_.victim].is_over || !ends_[program_.victim].has_begun) return;
      lost_at_ = stage.world.now();
      lost_ = LostRanks(*program_.loss, program_.victim, stage);
      Inflict(*program_.loss, program_.victim, stage);
    });
  }

  void RunRank(int rank, std::unique_ptr<Communicator> comm, Stage& stage) override {
    End& end = ends_[rank];
    end.has_begun = true;
    Draws draws(seed_ * 1000 + static_cast<uint64_t>(rank));
    for (const Loop& loop : program_.loops) {
      end.status = loop.trains ? Train(loop, *comm, end, draws) : Tick(loop, *comm, end, draws);
      if (!end.status.ok()) break;
    }
    if (balanced_.has_value()) end.status = balanced_->Train(*comm, end.awake_since);
    if (end.status.ok()) end.status = comm->Finalize(comm->timeout());
    end.when = stage.world.now();
    if (!end.status.ok()) comm->Abort(end.status);
    CheckGivenBack(end);
    end.is_over = true;
  }

  Verdict Judge(bool is_over, const Stage& stage) override {
    Verdict verdict;
    const auto complain = [&](bool& kind, int rank, absl::string_view text) {
      kind = true;
      verdict.complaints.push_back(absl::StrCat("rank ", rank, " ", text));
    };
    if (!is_over) {
      verdict.hangs = true;
      verdict.complaints.push_back("it was not over in time");
    }
    // A rank may be lost while others still make their group.
    const bool is_explained = lost_at_ > 0 && NamesLost(stage.crash);
    if (!stage.crash.empty() && !is_explained) {
      verdict.is_other = true;
      verdict.complaints.push_back(stage.crash);
    }
    if (const std::string text =
            balanced_.has_value() ? balanced_->Wrong(is_over && lost_at_ == 0) : "";
        !text.empty()) {
      verdict.is_wrong = true;
      verdict.complaints.push_back(text);
    }
    for (int rank = 0; rank < world_size(); ++rank) {
      const End& end = ends_[rank];
      if (!end.wrong.empty()) complain(verdict.is_wrong, rank, end.wrong);
      if (!end.is_over || !end.has_begun) continue;
      if (end.status.ok()) continue;
      const std::string text = end.status.ToString();
      if (lost_at_ == 0) {
        complain(verdict.is_other, rank, absl::StrCat("fails, but nothing is wrong: ", text));
        continue;
      }
      if (lost_.contains(rank) && program_.loss != LossKind::kStoreStoppedForAWhile)
        continue;  // If it is cut off, all others seem lost to it.
      verdict.seconds.push_back(
          static_cast<double>(end.when - std::max(lost_at_, end.awake_since)) * 1e-9);
      const Nanos detected = lost_at_ + absl::ToInt64Nanoseconds(kSilence);
      if (end.when > std::max(detected, end.awake_since) + kSoon)
        complain(verdict.is_other, rank, absl::StrCat("ends too late: ", text));
      if (!Names(FailureInfoOf(end.status)))
        complain(verdict.is_unnamed, rank, absl::StrCat("does not name the lost rank: ", text));
    }
    return verdict;
  }

 private:
  struct End {
    bool has_begun = false, is_over = false;
    absl::Status status;
    Nanos when = 0;
    Nanos awake_since = 0;  // When it was late for the last time.
    std::string wrong;      // The first wrong number.
    // The memory of failed calls: filled with kGivenBack, and no other rank writes to it.
    std::vector<Memory> given_back;
  };

  static absl::Span<float> FloatsOf(const Memory& memory) {
    return absl::MakeSpan(static_cast<float*>(memory.data.get()), memory.bytes / sizeof(float));
  }

  static void CheckGivenBack(End& end) {
    if (!end.given_back.empty()) absl::SleepFor(kLongStop);
    for (const Memory& memory : end.given_back) {
      const absl::Span<float> data = FloatsOf(memory);
      if (absl::c_count(data, kGivenBack) != static_cast<int64_t>(data.size()) && end.wrong.empty())
        end.wrong = "has memory of a failed call that another rank has written to";
    }
    end.given_back.clear();
  }

  bool NamesLost(const std::string& text) const {
    const std::set<int> named = NamedRanks(text);
    return std::any_of(lost_.begin(), lost_.end(), [&](int r) { return named.contains(r); });
  }

  bool Names(const std::optional<FailureInfo>& failure) const {
    if (!failure.has_value()) return false;
    const std::vector<int>& ranks = failure->ranks;
    if (program_.loss == LossKind::kStoreStoppedForAWhile) return ranks.empty();
    if (!ranks.empty() && std::includes(lost_.begin(), lost_.end(), ranks.begin(), ranks.end()))
      return true;
    // To a hub that is deaf it is the others that are lost.
    return failure->kind == FailureKind::kRankLost && program_.loss == LossKind::kDeaf &&
           program_.rank0_hosts && lost_.contains(0);
  }

  // Most ranks are on time, some are late, a few are very late.
  static void MayBeLate(End& end, Draws& draws) {
    if (!draws.OneIn(4)) return;
    absl::SleepFor(absl::Nanoseconds(draws.Magnitude(kMicrosecond, 3 * kSecond)));
    end.awake_since = World::Get()->now();
  }

  // Returns the ranks that issue the calls before or within this step.
  static std::vector<int> Callers(const Loop& loop, int step) {
    std::vector<int> callers;
    for (int rank = 0; rank < static_cast<int>(loop.inputs.size()); ++rank) {
      if (loop.inputs[rank] > step || (step == loop.most() && loop.inputs[rank] == step))
        callers.push_back(rank);
    }
    return callers;
  }

  // Shared memory is moved in chunks of 256 KiB: over it, some calls have several.
  static int CountOf(const Call& call, int step, const Communicator& comm) {
    constexpr int kSmall = 1000, kFactor = 45;
    const bool may_be_large =
        call.kind == Call::Kind::kAllReduce || call.kind == Call::Kind::kBroadcast;
    if (comm.backend_name() != "shm" || !may_be_large || call.count < kSmall || step % 2 == 0)
      return call.count;
    return call.count * kFactor;
  }

  static absl::Status Issue(const std::optional<Call>& call, const Loop& loop, int step,
                            JoinScope& scope, End& end, Draws& draws) {
    if (!call.has_value()) return absl::OkStatus();
    MayBeLate(end, draws);
    const int rank = scope.communicator().rank();
    const std::vector<int> callers = Callers(loop, step);
    const int64_t bytes =
        CountOf(*call, step, scope.communicator()) * static_cast<int64_t>(sizeof(float));
    EK_ASSIGN_OR_RETURN(const Memory memory, scope.communicator().Allocate(bytes));
    const absl::Span<float> data = FloatsOf(memory);
    std::fill(data.begin(), data.end(), static_cast<float>(rank + 1));
    std::vector<float> all;
    float expected = 0;
    const auto give_back = [&](absl::Status status) {
      std::fill(data.begin(), data.end(), kGivenBack);
      end.given_back.push_back(memory);
      return status;
    };
    switch (call->kind) {
      case Call::Kind::kBarrier:
        return scope.Barrier();
      case Call::Kind::kAllReduce:
        for (const int caller : callers) expected += static_cast<float>(caller + 1);
        if (const absl::Status status = scope.AllReduce(data, ReduceOp::kSum); !status.ok())
          return give_back(status);
        break;
      case Call::Kind::kBroadcast:
        expected = static_cast<float>(callers.back() + 1);
        if (const absl::Status status = scope.Broadcast(data, kHighestActive); !status.ok())
          return give_back(status);
        break;
      case Call::Kind::kAllGather: {
        all.assign(data.size() * loop.inputs.size(), -1.0f);
        EK_RETURN_IF_ERROR(scope.AllGather(data, absl::MakeSpan(all)));
        for (int from = 0; from < static_cast<int>(loop.inputs.size()); ++from) {
          const bool is_caller = std::count(callers.begin(), callers.end(), from) > 0;
          const float part = is_caller ? static_cast<float>(from + 1) : 0.0f;
          const auto begin = all.begin() + from * call->count;
          if (std::count(begin, begin + call->count, part) != call->count && end.wrong.empty())
            end.wrong = absl::StrCat("gathers wrong values from rank ", from, " in step ", step);
        }
        return absl::OkStatus();
      }
    }
    for (const float value : data) {
      if (value != expected && end.wrong.empty())
        end.wrong = absl::StrCat("has ", value, " instead of ", expected, " in step ", step);
    }
    return absl::OkStatus();
  }

  static absl::Status AwaitAnswer(const Loop& loop, Communicator& comm) {
    if (!loop.waiting.contains(comm.rank())) return absl::OkStatus();
    const std::shared_ptr<StepTicket> ticket = StepControl::Of(comm).current();
    return ticket == nullptr ? absl::OkStatus() : ticket->Wait().status();
  }

  static absl::Status Tick(const Loop& loop, Communicator& comm, End& end, Draws& draws) {
    internal::Ticker ticker(&comm, loop.waits);
    const int steps = loop.inputs[comm.rank()];
    return RunJoined({&ticker}, {}, [&](JoinScope& scope) -> absl::Status {
      for (int step = 0; step < steps; ++step) {
        MayBeLate(end, draws);
        EK_RETURN_IF_ERROR(Issue(loop.before[step], loop, step, scope, end, draws));
        EK_RETURN_IF_ERROR(ticker.Tick());
        EK_RETURN_IF_ERROR(AwaitAnswer(loop, comm));
        EK_RETURN_IF_ERROR(Issue(loop.within[step], loop, step, scope, end, draws));
      }
      MayBeLate(end, draws);
      if (steps < loop.most()) return absl::OkStatus();
      return Issue(loop.before[steps], loop, steps, scope, end, draws);
    });
  }

  static absl::Status Train(const Loop& loop, Communicator& comm, End& end, Draws& draws) {
    std::vector<std::vector<int>> batches;
    for (const int inputs : loop.inputs) {
      batches.emplace_back(inputs);
      std::iota(batches.back().begin(), batches.back().end(), 0);
    }
    JoinScope* scope = nullptr;
    ToySettings settings{.batches = batches[comm.rank()],
                         .joins = true,
                         .list = loop.list,
                         .is_sharded = loop.is_sharded,
                         .join_options = {}};
    settings.on_scope = [&](JoinScope& begun) { scope = &begun; };
    settings.at = [&](StepPoint point, int step, int gradients) -> absl::Status {
      MayBeLate(end, draws);
      const bool is_last = point == StepPoint::kLoopEnd;
      if (is_last && step < loop.most()) return absl::OkStatus();
      if (is_last || point == StepPoint::kBeforeRecord)
        return Issue(loop.before[step], loop, step, *scope, end, draws);
      if (point == StepPoint::kForward) EK_RETURN_IF_ERROR(AwaitAnswer(loop, comm));
      if (point == StepPoint::kBackward && gradients == 2)
        return Issue(loop.within[step], loop, step, *scope, end, draws);
      return absl::OkStatus();
    };
    EK_ASSIGN_OR_RETURN(std::unique_ptr<ToyTrainer> trainer, ToyTrainer::Create(&comm, settings));
    const absl::Status status = trainer->Train();
    const ToyResult& result = trainer->result();
    const std::vector<ToyState> alone = TrainToyAlone(GroupSteps(batches));
    if (!IsClose(result.last.weights, alone[result.steps].weights) && end.wrong.empty())
      end.wrong = absl::StrCat("has wrong weights after ", result.steps, " steps");
    if (status.ok() && end.wrong.empty() &&
        (!IsClose(result.ended.weights, alone.back().weights) ||
         !IsClose(result.ended.momentum, alone.back().momentum))) {
      end.wrong = "ends its training with wrong weights or a wrong momentum";
    }
    if (!status.ok()) comm.Abort(status);
    return status;
  }

  const uint64_t seed_;
  const Program program_;
  std::vector<End> ends_;  // By rank.
  std::optional<BalancedRun> balanced_;
  Nanos lost_at_ = 0;
  std::set<int> lost_;
};

}  // namespace

std::unique_ptr<Play> MakeProgramPlay(uint64_t seed, const PlayOptions& options) {
  Draws draws(seed ^ 0x9706aa3);
  const int sizes = static_cast<int>(options.world_sizes.size());
  const int world_size = options.world_sizes[draws.Below(sizes)];
  return std::make_unique<ProgramPlay>(seed, DrawProgram(draws, world_size));
}

std::unique_ptr<Play> MakeBalancePlay(uint64_t seed, const PlayOptions& options) {
  Draws draws(seed ^ 0xba1a9ce);
  const int sizes = static_cast<int>(options.world_sizes.size());
  Program program{.world_size = options.world_sizes[draws.Below(sizes)]};
  program.rank0_hosts = draws.OneIn(3);
  program.balanced = DrawBalanced(draws, program.world_size);
  if (!program.balanced->is_steady) DrawLoss(draws, program);
  return std::make_unique<ProgramPlay>(seed, std::move(program));
}

}  // namespace evenkeel::simulation
