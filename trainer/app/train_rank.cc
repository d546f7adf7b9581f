#include "evenkeel/trainer/app/train_rank.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/phase.h"
#include "evenkeel/join/straggler.h"
#include "evenkeel/trainer/app/describe_options.h"
#include "evenkeel/trainer/app/memory_plan.h"
#include "evenkeel/trainer/app/progress.h"
#include "evenkeel/trainer/app/rank_setup.h"
#include "evenkeel/trainer/app/run_recorder.h"
#include "evenkeel/trainer/app/share_log.h"
#include "evenkeel/trainer/app/sum_over_ranks.h"
#include "evenkeel/trainer/app/training_run.h"
#include "evenkeel/trainer/checkpoint/checkpoint_folder.h"
#include "evenkeel/trainer/checkpoint/run_checkpoints.h"
#include "evenkeel/trainer/checkpoint/run_state.h"
#include "evenkeel/trainer/models/evaluate.h"
#include "evenkeel/trainer/models/model_file.h"
#include "evenkeel/trainer/report/gather_records.h"
#include "evenkeel/trainer/report/output_failures.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/trainer/report/sample_log.h"

namespace evenkeel {
namespace {

constexpr int64_t kStepsPerStragglerReport = 50;
constexpr absl::Duration kReportEvery = absl::Minutes(1);

// A run on this rank, which survives the loss of others:
//
//   begin -> train the remaining epochs -> save, report the end, leave the group
//              ^                    | another rank is lost, anywhere above
//              +---- find the place <---- leave it behind
class Job {
 public:
  Job(TrainingRun& run, const TrainStreams& streams, RunRecord history)
      : run_(run),
        options_(run.options()),
        streams_(streams),
        failures_(streams.log),
        recorder_(run, std::move(history)),
        epoch_(run.first_epoch()),
        has_record_(!run.communicator().waiting()) {
    run_.SetOnSaved(
        [this](const EndedCheckpoint& ended, bool goes_on) { OnSaved(ended, goes_on); });
  }

  const RunRecorder& recorder() const { return recorder_; }

  bool was_stopped() const { return was_stopped_; }

  absl::Status Run() {
    // A newcomer begins where the others go on.
    absl::Status status = run_.communicator().waiting() ? Continue(absl::OkStatus()) : TrainAll();
    while (!status.ok() && options_.goes_on && !run_.failed_locally()) {
      status = Continue(status);
      if (has_given_up_) break;
    }
    if (status.ok()) status = run_.EndSampleLog();
    // The record of a run that has failed may show the reason. If the run continues without
    // this rank, another rank writes it.
    if (!status.ok() && output_ != nullptr && !is_left_behind_) {
      output_->OnStopped();
      recorder_.Write({run_.Record()}, status.message(), failures_);
    }
    if (!status.ok() && options_.goes_on && !run_.failed_together())
      run_.communicator().Abort(status);
    return status;
  }

 private:
  // The facts about the run's past that a newcomer takes over.
  struct Taken {
    std::string record;
    RunPast past;

    static void VisitFields(auto& self, auto& visit) { visit(self.record, self.past); }
  };

  // Continues after `why`, if this rank can.
  absl::Status Continue(const absl::Status& why) {
    const std::vector<LostRank>& lost = past_.lost;
    if (lost.empty() || lost.back().pause_ms > 0) paused_ = SteadyNow();
    if (const absl::Status left = LeaveLostRanks(why); !left.ok()) {
      has_given_up_ = true;  // No rank can continue, or all except this one do.
      is_left_behind_ = absl::IsAborted(left);
      return left;
    }
    EK_RETURN_IF_ERROR(FindPlace());
    return TrainAll();
  }

  absl::Status TrainAll() {
    EK_RETURN_IF_ERROR(ShareHosts());
    // The current rank 0 reports.
    if (run_.communicator().rank() == 0 && output_ == nullptr) {
      output_ = std::make_unique<RunOutput>(streams_, run_, recorder_, failures_, past_);
    }
    const auto on_step = [this](const StepFacts& facts) {
      recorder_.OnStep(facts);
      past_.lost_written = static_cast<int>(past_.lost.size());
      if (past_.steps.size() == 2) past_.steps.erase(past_.steps.begin());
      past_.steps.push_back(facts);
      if (output_ != nullptr) output_->OnStep(facts);
      ReportShares(facts.step);
      if ((facts.step + 1) % kStepsPerStragglerReport == 0) ReportStragglers(facts.step);
      RenewReport();
      return absl::OkStatus();
    };
    const Pauses pauses{.on_test =
                            [this](const TestResult& tested) {
                              recorder_.OnTest(tested.steps, tested.test);
                              if (output_ != nullptr) output_->OnTest(tested);
                              return SaveIfBest(tested);
                            },
                        .on_sample =
                            [this](int64_t steps, const std::string& text) {
                              recorder_.OnEvent(steps - 1, kSampleEvent, text);
                              if (output_ != nullptr) output_->OnSample(steps, text);
                              return absl::OkStatus();
                            }};
    bool stopped = run_.has_converged();  // It was resumed.
    if (stopped) NoteConvergence(run_.first_step());
    for (; epoch_ < run_.plan().epochs() && !stopped; ++epoch_) {
      EK_ASSIGN_OR_RETURN(const EpochResult result, run_.TrainEpoch(epoch_, on_step, pauses));
      if (result.stopped_after.has_value()) return Stop(result);
      EK_ASSIGN_OR_RETURN(const TestResult tested, run_.TestEpoch());
      test_ = tested.test;
      recorder_.OnEpoch(epoch_, result, tested);
      if (output_ != nullptr) output_->OnEpoch(epoch_, result, tested);
      EK_RETURN_IF_ERROR(SaveIfBest(tested));
      // If rank 0 is lost before it has written the line and the best weights, the others have not
      // finished the epoch, and evaluate again. Within an epoch the next step waits for rank 0.
      if (options_.goes_on)
        EK_RETURN_IF_ERROR(ExchangeValues(run_.communicator(), "epoch written", epoch_).status());
      stopped = result.stopped_early;
      if (run_.has_converged()) {
        NoteConvergence(tested.steps);
        stopped = true;
      }
    }
    // The checkpoint has all the steps already.
    if (test_.predictions == 0) {
      EK_ASSIGN_OR_RETURN(test_, run_.Test());
    }
    EK_ASSIGN_OR_RETURN(const uint64_t state_hash, run_.AgreeOnState());
    // The weights first: they are the most important result.
    if (output_ != nullptr && !has_ended_ && SavesLast()) {
      EK_RETURN_IF_ERROR(
          run_.Own(SaveWeights({{"test_accuracy", absl::StrCat(test_.accuracy())}})));
    }
    if (options_.wants_record()) EK_RETURN_IF_ERROR(WriteRecord(/*ending=*/""));
    if (output_ != nullptr && !has_ended_) {
      EK_RETURN_IF_ERROR(run_.Own(output_->OnEnd(test_, state_hash)));
      has_ended_ = true;
    }
    EK_RETURN_IF_ERROR(run_.FinishSaves());
    return options_.goes_on ? run_.communicator().Finalize() : absl::OkStatus();
  }

  // Ends a stopped run between two steps. All ranks have written a checkpoint; without one the
  // weights are saved, if --save asks for it.
  absl::Status Stop(const EpochResult& result) {
    was_stopped_ = true;
    std::string saved = result.checkpoint;
    if (saved.empty() && !options_.flags.save.empty() && SavesLast()) {
      EK_RETURN_IF_ERROR(run_.ShareBuffers());
      if (output_ != nullptr) {
        EK_RETURN_IF_ERROR(run_.Own(SaveWeights({{"steps", absl::StrCat(*result.stopped_after)}})));
      }
      saved = options_.flags.save;
    }
    if (output_ != nullptr) output_->OnStopped();
    if (options_.wants_record()) {
      EK_RETURN_IF_ERROR(WriteRecord(absl::StrCat("The run was asked to stop and stopped after ",
                                                  *result.stopped_after, " steps.")));
    }
    if (output_ != nullptr) {
      const bool is_no_best = options_.flags.save_best && saved == options_.flags.save;
      absl::FPrintF(
          streams_.log, "%s: stopped after step %d%s%s; %s\n", program_invocation_short_name,
          *result.stopped_after, saved.empty() ? "" : ", saved " + saved,
          is_no_best ? " (the last weights, since no evaluation has determined the best)" : "",
          result.checkpoint.empty()
              ? "with --checkpoint_dir the same command would continue from there"
              : "the same command continues from there");
      std::fflush(streams_.log);
    }
    return options_.goes_on ? run_.communicator().Finalize() : absl::OkStatus();
  }

  // Writes the report and the trace, from the records of all ranks.
  absl::Status WriteRecord(absl::string_view ending) {
    EK_ASSIGN_OR_RETURN(std::vector<RankRecord> records,
                        GatherRecords(run_.communicator(), run_.Record()));
    if (output_ != nullptr) recorder_.Write(std::move(records), ending, failures_);
    return absl::OkStatus();
  }

  // The report of a run that goes on has the record of this rank alone.
  void RenewReport() {
    if (output_ == nullptr || !options_.wants_record()) return;
    const absl::Time now = SteadyNow();
    if (now - renewed_ < kReportEvery) return;
    renewed_ = now;
    recorder_.Write({run_.Record()}, /*ending=*/std::nullopt, failures_);
  }

  absl::Status SaveIfBest(const TestResult& tested) {
    if (!options_.flags.save_best || !tested.is_best || output_ == nullptr) return absl::OkStatus();
    const PhaseScope saving(run_.communicator(), StepPhase::kSaving);
    return run_.Own(SaveWeights({{"steps", absl::StrCat(tested.steps)},
                                 {"test_loss", absl::StrCat(tested.test.loss_mean())}}));
  }

  // The last weights are saved, too, if none were the best.
  bool SavesLast() const { return !options_.flags.save_best || !run_.has_best(); }

  void OnSaved(const EndedCheckpoint& ended, bool goes_on) {
    if (!ended.status.ok()) {
      recorder_.OnEvent(
          std::max<int64_t>(0, ended.step - 1), "unsaved",
          absl::StrCat("the checkpoint of step ", ended.step, " failed: ", ended.status.message()));
    }
    if (output_ != nullptr) output_->OnCheckpoint(ended);
    // If the run ends with the error, its end reports it.
    if (ended.status.ok() || !goes_on || run_.communicator().rank() != 0) return;
    absl::FPrintF(streams_.log,
                  "%s: the checkpoint of step %d failed: %s; training continues; %s\n",
                  program_invocation_short_name, ended.step, ended.status.message(),
                  !ended.newest.ok() ? ended.newest.status().message()
                  : *ended.newest < 0
                      ? "there is no complete checkpoint"
                      : absl::StrCat("the newest complete checkpoint is step ", *ended.newest));
    std::fflush(streams_.log);
  }

  void NoteConvergence(int64_t step) {
    recorder_.OnEvent(
        std::max<int64_t>(0, step - 1), "converged",
        absl::StrCat("no lower test loss in ", options_.flags.patience, " evaluations"));
    if (output_ != nullptr) output_->OnConverged(step, options_.flags.patience);
  }

  absl::Status SaveWeights(const std::map<std::string, std::string>& metadata) {
    if (options_.flags.save.empty()) return absl::OkStatus();
    EK_RETURN_IF_ERROR((options_.saves_folder() ? SaveModelFolder : SaveModel)(
        run_.model(), options_.flags.save, metadata));
    output_->OnSaved(options_.flags.save);
    run_.NoteCheckpoint(options_.flags.save);
    return absl::OkStatus();
  }

  absl::Status ShareHosts() {
    Communicator& comm = run_.communicator();
    EK_ASSIGN_OR_RETURN(const std::vector<std::string> hosts,
                        comm.control().Exchange("hosts", HostName(), comm.timeout()));
    has_one_host_ = std::ranges::count(hosts, hosts[0]) == std::ssize(hosts);
    hosts_.clear();
    for (size_t i = 0; i < hosts.size(); ++i) hosts_[comm.members()[i]] = hosts[i];
    return absl::OkStatus();
  }

  void ReportShares(int64_t step) {
    const std::string shares = run_.ShareNews();
    if (shares.empty()) return;
    recorder_.OnEvent(step, "shares", shares);
    if (output_ != nullptr) output_->OnShares(shares);
  }

  void ReportStragglers(int64_t step) {
    std::function<std::string(int rank)> host_of = nullptr;
    if (!has_one_host_) host_of = [this](int rank) { return hosts_[rank]; };
    const std::string news = StragglerNews(run_.communicator(), host_of);
    const StragglerReport recent = RecentStragglersOf(run_.communicator());
    recorder_.OnStragglers(step, recent);
    if (!news.empty()) recorder_.OnEvent(step, "straggler", news);
    if (output_ != nullptr) output_->OnStragglers(step, news, recent);
  }

  absl::Status LeaveLostRanks(const absl::Status& why) {
    const bool is_newcomer = run_.communicator().waiting();
    const std::string cause(
        run_.communicator().status().ok() ? why.message() : run_.communicator().status().message());
    const std::vector<int> members = run_.communicator().members();
    EK_ASSIGN_OR_RETURN(const GoneOn gone_on, run_.GoOn(why));
    for (int rank : gone_on.lost) {
      past_.lost.push_back({.rank = rank,
                            .step = gone_on.steps,
                            .is_replaced = std::ranges::count(gone_on.replaced, rank) > 0,
                            .cause = cause});
    }
    recorder_.OnLost(members, gone_on, SteadyNow() - paused_);
    if (run_.communicator().rank() == 0)
      LogLostRanks(gone_on, is_newcomer ? "this process has taken its place" : cause);
    return absl::OkStatus();
  }

  // The first rank that has the record of the run sends it to those that have entered.
  absl::Status ShareRecord() {
    Communicator& comm = run_.communicator();
    EK_ASSIGN_OR_RETURN(const std::vector<int> have,
                        ExchangeValues<int>(comm, "has record", has_record_ ? 1 : 0));
    const auto source = std::ranges::find(have, 1) - have.begin();
    if (source == comm.world_size()) has_record_ = true;  // The last one is lost: it begins here.
    if (source == comm.world_size() || std::ranges::count(have, 0) == 0) return absl::OkStatus();
    constexpr char kTopic[] = "record of the run";
    if (!has_record_) {
      EK_ASSIGN_OR_RETURN(const std::string bytes, comm.control().Receive(kTopic, comm.timeout()));
      EK_ASSIGN_OR_RETURN(Taken taken, internal::FromBytes<Taken>(bytes, kTopic));
      EK_ASSIGN_OR_RETURN(RunRecord record, ParseRunRecord(taken.record));
      recorder_.TakeOver(std::move(record));
      past_ = std::move(taken.past);
      has_record_ = true;
    } else if (comm.rank() == source) {
      const std::string bytes = internal::ToBytes(Taken{Serialize(recorder_.Now()), past_});
      for (int rank = 0; rank < comm.world_size(); ++rank) {
        if (have[rank] == 0) comm.control().Send(rank, kTopic, bytes);
      }
    }
    return absl::OkStatus();
  }

  absl::Status FindPlace() {
    EK_ASSIGN_OR_RETURN(epoch_, run_.FindPlace(epoch_));
    for (LostRank& lost : past_.lost) {
      if (lost.pause_ms == 0) lost.pause_ms = absl::ToDoubleMilliseconds(SteadyNow() - paused_);
    }
    if (options_.replaces) EK_RETURN_IF_ERROR(ShareRecord());
    test_ = {};  // A newcomer has none; all ranks evaluate again if no epoch is left.
    // The new rank 0 may be on another host: a failure does not end the run.
    if (run_.communicator().rank() == 0)
      failures_.Note("--balance_log",
                     EndShareLog(run_.communicator(), options_, past_.lost.back().step));
    if (output_ != nullptr) output_->OnLost(past_.lost);
    return absl::OkStatus();
  }

  void LogLostRanks(const GoneOn& gone_on, const std::string& cause) {
    const int left = run_.communicator().world_size();
    const bool is_one = gone_on.lost.size() == 1;
    const std::string replaced =
        gone_on.replaced.empty() ? ""
        : gone_on.replaced.size() == gone_on.lost.size()
            ? " and replaced"
            : absl::StrCat(", and ", gone_on.replaced.size(), " of them replaced");
    absl::FPrintF(streams_.log, "%s%s: rank%s %s %s lost%s (%s): %d rank%s after step %d\n",
                  BeginLine(streams_.log), program_invocation_short_name, is_one ? "" : "s",
                  absl::StrJoin(gone_on.lost, ", "), is_one ? "is" : "are", replaced, cause, left,
                  left == 1 ? " continues" : "s continue", gone_on.steps);
    for (const std::string& damage : gone_on.repaired)
      absl::FPrintF(streams_.log, "%s: repaired: %s\n", program_invocation_short_name, damage);
    std::fflush(streams_.log);
  }

  TrainingRun& run_;
  const TrainOptions& options_;
  const TrainStreams streams_;
  OutputFailures failures_;
  RunRecorder recorder_;
  std::unique_ptr<RunOutput> output_;  // Null on all ranks but rank 0 of the group.
  int epoch_;                          // The epochs before it are finished.
  Evaluation test_;                    // After the last finished epoch.
  std::map<int, std::string> hosts_;   // By rank of the job's first group.
  bool has_one_host_ = true;
  RunPast past_;
  absl::Time paused_;                 // When the ranks paused last, because one was lost.
  bool has_record_;                   // False on a newcomer until it has those of the others.
  absl::Time renewed_ = SteadyNow();  // When the report was written.
  bool has_given_up_ = false;         // This rank cannot continue.
  bool is_left_behind_ = false;       // The other ranks continue without this one.
  bool has_ended_ = false;            // This rank has left the group.
  bool was_stopped_ = false;
};

// Prints the checkpoint from which the run is resumed.
void TellBeginning(const RunCheckpoints& checkpoints, const TrainStreams& streams) {
  const RunState* const state = checkpoints.resumed();
  if (state == nullptr) return;
  for (const std::string& line : checkpoints.passed_over())
    absl::FPrintF(streams.log, "%s: %s\n", program_invocation_short_name, line);
  std::FILE* const out = streams.out;
  absl::FPrintF(out, "resumed from %s, after step %d\n", checkpoints.resumed_from(), state->steps);
  for (const std::string& note : checkpoints.terms().notes) absl::FPrintF(out, "  %s\n", note);
  std::fflush(out);
}

// Returns the report's history of the earlier attempts.
RunRecord HistoryOf(const RunCheckpoints* checkpoints, std::FILE* log) {
  if (checkpoints == nullptr) return {};
  const absl::StatusOr<std::string>& bytes = checkpoints->history();
  if (bytes.ok() && bytes->empty()) return {};
  absl::StatusOr<RunRecord> history =
      bytes.ok() ? ParseRunRecord(*bytes) : absl::StatusOr<RunRecord>(bytes.status());
  if (history.ok()) return *std::move(history);
  absl::FPrintF(log, "%s: the report begins after step %d: %s: %s\n", program_invocation_short_name,
                checkpoints->resumed()->steps, checkpoints->resumed_from(),
                history.status().message());
  return {};
}

// Checks this rank, and agrees with the others that each host or device has the memory of its
// ranks, before any rank takes it.
absl::StatusOr<RankSetup> CheckTogether(
    Communicator& comm, const TrainOptions& options,
    const absl::StatusOr<std::shared_ptr<const TrainingData>>& data, std::FILE* log) {
  absl::StatusOr<RankSetup> setup = CheckRank(options, data, comm.rank(), comm.world_size());
  const absl::StatusOr<RankMemory> planned =
      setup.ok() ? PlanMemory(options, comm.rank(), comm.world_size(), *setup)
                 : absl::StatusOr<RankMemory>(setup.status());
  const RankMemory memory = planned.value_or(RankMemory());
  RankMemory missing = memory;
  missing.data = 0;  // It is loaded already.
  const bool is_device = comm.runtime() != nullptr;
  const MemoryNeeds needs = NeedsOf(
      missing,
      is_device ? DeviceMemory(comm.device(), comm.runtime()->Facts(comm.device())) : HostMemory(),
      is_device);
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> values,
                      AgreeOn(comm, "memory", planned.status(), internal::ToBytes(needs)));
  std::vector<MemoryNeeds> all;
  for (const std::string& value : values) {
    EK_ASSIGN_OR_RETURN(all.emplace_back(),
                        internal::FromBytes<MemoryNeeds>(value, "the memory that a rank needs"));
  }
  const MemoryVerdict verdict = JudgeMemory(all);
  EK_RETURN_IF_ERROR(
      RefuseTooMuch(verdict, memory, options, *data, comm.rank(), comm.world_size()));
  if (verdict.kind == MemoryVerdict::kClose && comm.rank() == 0)
    absl::FPrintF(log, "%s: the memory may not suffice: %s\n", program_invocation_short_name,
                  verdict.text);
  return setup;
}

// Makes this rank's file of --sample_log, if the options ask for it.
absl::StatusOr<std::unique_ptr<SampleLog>> OpenSampleLog(Communicator& comm,
                                                         const TrainOptions& options) {
  const std::string& folder = options.flags.sample_log;
  if (folder.empty()) return nullptr;
  SampleWriter writer{.rank = comm.members()[comm.rank()], .incarnation = options.incarnation};
  // A newcomer learns the attempt, and makes the file, when it has its place.
  if (comm.waiting()) return std::make_unique<SampleLog>(folder, writer);
  const absl::StatusOr<int> next = NextSampleAttempt(folder);
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> of_ranks,
                      AgreeOn(comm, "sample log", Annotate(next.status(), "--sample_log"),
                              absl::StrCat(next.value_or(0))));
  // The folders of hosts may differ.
  for (const std::string& of_rank : of_ranks) {
    int attempt = 0;
    if (absl::SimpleAtoi(of_rank, &attempt)) writer.attempt = std::max(writer.attempt, attempt);
  }
  auto log = std::make_unique<SampleLog>(folder, writer);
  EK_RETURN_IF_ERROR(AgreeOn(comm, "sample log", Annotate(log->Open(), "--sample_log")).status());
  return log;
}

TrainResult Failed(const absl::Status& status, bool is_common, const Communicator& comm) {
  return {.status = status, .is_common = is_common, .reports = !is_common || comm.rank() == 0};
}

TrainResult RunPrepared(Communicator& comm, const TrainOptions& options, RankSetup setup,
                        const TrainStreams& streams) {
  std::unique_ptr<RunCheckpoints> checkpoints;
  if (!options.checkpoints.folder.empty() || options.checkpoints.resumes_from_path()) {
    const RunSettings settings = SettingsOf(options, *setup.model, *setup.data, comm.world_size());
    auto opened = RunCheckpoints::Open(comm, options.checkpoints, settings, *setup.model);
    if (!opened.ok()) return Failed(opened.status(), comm.status().ok(), comm);
    checkpoints = *std::move(opened);
    if (comm.rank() == 0) TellBeginning(*checkpoints, streams);
  }
  const bool is_resumed = checkpoints != nullptr && checkpoints->resumed() != nullptr;
  auto shares = OpenShareLog(comm, options, is_resumed ? checkpoints->resumed()->steps : 0);
  if (!shares.ok()) return Failed(shares.status(), comm.status().ok(), comm);
  setup.repeat = std::move(shares->repeat);
  auto sample_log = OpenSampleLog(comm, options);
  if (!sample_log.ok()) return Failed(sample_log.status(), comm.status().ok(), comm);
  setup.sample_log = *std::move(sample_log);
  auto run = TrainingRun::Create(&comm, options, std::move(setup), checkpoints.get());
  // All ranks get the errors of the checkpoint.
  if (!run.ok()) return Failed(run.status(), is_resumed && comm.status().ok(), comm);
  TrainResult result;
  Job job(**run, streams, HistoryOf(checkpoints.get(), streams.log));
  if (checkpoints != nullptr) {
    checkpoints->SetHistory([&job]() -> RunCheckpoints::FinishHistory {
      return [record = job.recorder().Now()](std::vector<RankRecord> ranks) {
        return Serialize(WithRanks(record, std::move(ranks)));
      };
    });
  }
  const absl::Status status = job.Run();
  if (!status.ok()) result = Failed(status, (*run)->failed_together(), (*run)->communicator());
  result.was_stopped = job.was_stopped();
  // The destructor of the run waits for its device, which may have pending collectives that the
  // other ranks will not issue.
  if (!result.status.ok() && !result.is_common && comm.runtime() != nullptr)
    comm.Abort(result.status);
  return result;
}

TrainResult Train(Communicator& comm, const TrainOptions& options,
                  const absl::StatusOr<std::shared_ptr<const TrainingData>>& data,
                  const TrainStreams& streams) {
  absl::StatusOr<RankSetup> setup = CheckTogether(comm, options, data, streams.log);
  if (!setup.ok()) return Failed(setup.status(), comm.status().ok(), comm);
  absl::Status mine = MakeModel(options, comm.rank(), *setup);
  if (mine.ok() && comm.runtime() != nullptr)
    mine = MoveToDevice(options, *comm.runtime(), comm.device(), *setup);
  if (mine.ok()) mine = setup->model->MoveValuesTo(comm);
  const absl::Status agreed = AgreeOn(comm, "setup", mine).status();
  if (!agreed.ok()) return Failed(agreed, comm.status().ok(), comm);
  TrainResult result = RunPrepared(comm, options, *std::move(setup), streams);
  // Unless it has ended before.
  if (!result.status.ok() && options.goes_on && !result.is_common) comm.Abort(result.status);
  return result;
}

}  // namespace

TrainResult TrainRank(Communicator& comm, const TrainOptions& options,
                      const absl::StatusOr<std::shared_ptr<const TrainingData>>& data,
                      const TrainStreams& streams) {
  absl::Status status;
  try {
    return Train(comm, options, data, streams);
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError(
        "not enough memory to train; use a smaller model or --batch_size, or more ranks with "
        "--zero");
  } catch (const std::exception& error) {  // For example, when a thread cannot be started.
    status = absl::InternalError(absl::StrCat("exception: ", error.what()));
  }
  comm.Abort(status);  // The other ranks get the reason.
  return Failed(status, /*is_common=*/false, comm);
}

}  // namespace evenkeel
