// Runs the real code of many ranks in simulated worlds, and judges the end of every rank.
//
//   bazel run //tests/simulation -- --seeds=1000                  # seeds 0 to 999
//   bazel run //tests/simulation -- --seeds=1 --first=4711 --trace
//   bazel run //tests/simulation -- --seeds=10000 --worlds=8,16,64 --jobs=8
//   bazel run //tests/simulation -- --seeds=1000 --backends=tcp,shm,hierarchical
//
// A seed determines the ranks, the fault, the network, the clocks and the order in which threads
// run. Each failure is printed with its seed. The exit code is 1 if a seed failed.

#include <errno.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/tests/faults/verdict.h"
#include "evenkeel/tests/simulation/play.h"
#include "evenkeel/tests/simulation/weather.h"
#include "gflags/gflags.h"

DEFINE_uint64(first, 0, "The first seed.");
DEFINE_uint64(seeds, 100, "The number of seeds.");
DEFINE_string(worlds, "2,3,4,5,8", "The numbers of ranks to choose from.");
DEFINE_string(backends, "tcp",
              "The backends to choose from: tcp, shm (all ranks on one machine), hierarchical "
              "(several ranks on each machine).");
DEFINE_string(play, "",
              "Runs only plays of this kind: fault, program, elastic, replace or balance.");
DEFINE_int32(jobs, 2, "The number of worlds that run at a time, one on each processor.");
DEFINE_bool(list, false, "Only lists the runs.");
DEFINE_bool(trace, false, "Prints every event.");
DEFINE_bool(hashes, false, "Prints the hash of each run's trace, and the time it took.");
DEFINE_bool(cut_down, true, "Searches, for each seed that fails, for a smaller run that fails.");
DEFINE_int32(most_failures, 20, "Starts no more seeds after so many failures.");

namespace evenkeel::simulation {
namespace {

constexpr Nanos kLimit = 90 * kSecond;  // Virtual time.
// A run has up to 80 steps, in each of which ranks may pause, or several waits for newcomers.
constexpr Nanos kLongLimit = 300 * kSecond;
constexpr int kMostTries = 300;             // To cut a run down.
constexpr size_t kMostLines = 20;           // Of a failure's complaints, and of its warnings.
constexpr unsigned kPatienceSeconds = 600;  // Real time, for one world.

struct Result {
  uint64_t seed = 0;
  int hangs = 0, wrong = 0, unnamed = 0, other = 0;
  double slowest = 0;  // Seconds of virtual time from the fault to the last rank's report.
  uint64_t trace_hash = 0;
  double virtual_seconds = 0, real_seconds = 0;
  std::string text;  // Complaints, one to a line.
};

std::vector<int> WorldSizes() {
  std::vector<int> sizes;
  for (const absl::string_view part : absl::StrSplit(FLAGS_worlds, ',')) {
    int size = 0;
    if (!absl::SimpleAtoi(part, &size) || size < 2 || size > 4096) {
      std::cerr << "simulation: --worlds=" << FLAGS_worlds
                << ": give numbers of ranks from 2 to 4096, separated by commas\n";
      std::exit(2);
    }
    sizes.push_back(size);
  }
  return sizes;
}

std::vector<std::string> Backends() {
  std::vector<std::string> backends = absl::StrSplit(FLAGS_backends, ',');
  for (const std::string& backend : backends) {
    if (backend == "tcp" || backend == "shm" || backend == "hierarchical") continue;
    std::cerr << "simulation: --backends=" << FLAGS_backends
              << ": give tcp, shm or hierarchical, separated by commas\n";
    std::exit(2);
  }
  return backends;
}

std::unique_ptr<Play> PlayOf(uint64_t seed) {
  static const PlayOptions options{.world_sizes = WorldSizes()};
  if (FLAGS_play == "fault") return MakeFaultPlay(seed, options);
  if (FLAGS_play == "program") return MakeProgramPlay(seed, options);
  if (FLAGS_play == "elastic") return MakeElasticPlay(seed, options);
  if (FLAGS_play == "replace") return MakeReplacePlay(seed, options);
  if (FLAGS_play == "balance") return MakeBalancePlay(seed, options);
  return MakePlay(seed, options);
}

Weather WeatherOf(uint64_t seed) {
  static const std::vector<std::string> backends = Backends();
  Weather weather = DrawWeather(seed, PlayOf(seed)->world_size(), backends);
  weather.world.traces = FLAGS_trace;
  return weather;
}

void AppendLines(const std::vector<std::string>& lines, std::string& text) {
  for (size_t i = 0; i < std::min(lines.size(), kMostLines); ++i)
    absl::StrAppend(&text, lines[i], "\n");
  if (lines.size() > kMostLines)
    absl::StrAppend(&text, "and ", lines.size() - kMostLines, " more\n");
}

// Runs in a process of its own: writes the result to `out`, and ends the process.
[[noreturn]] void RunHere(Play& play, const Weather& weather, int out) {
  alarm(kPatienceSeconds);
  const absl::Time start = absl::Now();
  const bool is_long = FLAGS_play == "balance" || FLAGS_play == "replace";
  const PlayedRun run = Perform(play, weather, is_long ? kLongLimit : kLimit);
  const Verdict& verdict = run.verdict;
  const double slowest = verdict.seconds.empty()
                             ? 0
                             : *std::max_element(verdict.seconds.begin(), verdict.seconds.end());
  std::string text =
      absl::StrCat(verdict.hangs, " ", verdict.is_wrong, " ", verdict.is_unnamed, " ",
                   verdict.is_other, " ", slowest, " ", run.trace_hash, " ", run.time * 1e-9, " ",
                   absl::ToDoubleSeconds(absl::Now() - start), "\n");
  AppendLines(verdict.complaints, text);
  if (!verdict.is_good()) AppendLines(absl::StrSplit(run.warnings, '\n', absl::SkipEmpty()), text);
  (void)!write(out, text.data(), text.size());
  _exit(0);
}

struct Running {
  uint64_t seed;
  int out;  // A file in memory, in which the process writes its result.
};

pid_t Start(Play& play, const Weather& weather, Running& running) {
  running = {weather.world.seed, memfd_create("result", MFD_CLOEXEC)};
  if (running.out < 0) {
    std::cerr << "simulation: no file in memory can be made for the result of a run\n";
    std::exit(2);
  }
  const pid_t child = fork();
  if (child == 0) RunHere(play, weather, running.out);
  return child;
}

Result Collect(const Running& running, int status) {
  std::string text;
  char buffer[4096];
  lseek(running.out, 0, SEEK_SET);
  for (ssize_t got; (got = read(running.out, buffer, sizeof(buffer))) > 0;)
    text.append(buffer, got);
  close(running.out);
  Result result{.seed = running.seed};
  const size_t end = text.find('\n');
  const std::vector<std::string> fields = absl::StrSplit(text.substr(0, end), ' ');
  if (fields.size() != 8) {
    result.other = 1;
    result.text = WIFSIGNALED(status)
                      ? absl::StrCat("its process was ended by signal ", WTERMSIG(status), "\n")
                      : absl::StrCat("its process ended with code ", WEXITSTATUS(status), "\n");
    return result;
  }
  int* const counts[] = {&result.hangs, &result.wrong, &result.unnamed, &result.other};
  for (int i = 0; i < 4; ++i) (void)absl::SimpleAtoi(fields[i], counts[i]);
  (void)absl::SimpleAtod(fields[4], &result.slowest);
  (void)absl::SimpleAtoi(fields[5], &result.trace_hash);
  (void)absl::SimpleAtod(fields[6], &result.virtual_seconds);
  (void)absl::SimpleAtod(fields[7], &result.real_seconds);
  result.text = text.substr(end + 1);
  return result;
}

bool IsGood(const Result& result) {
  return result.hangs + result.wrong + result.unnamed + result.other == 0;
}

Result Run(Play& play, const Weather& weather) {
  Running running;
  const pid_t child = Start(play, weather, running);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return Collect(running, status);
}

// Removes elements of a failing run, one at a time, as long as it still fails, and prints the rest.
void CutDown(uint64_t seed) {
  std::unique_ptr<Play> play = PlayOf(seed);
  Weather weather = WeatherOf(seed);
  weather.world.traces = false;
  bool has_changed = true;
  for (int tries = 0; has_changed && tries < kMostTries;) {
    has_changed = false;
    for (const Weather& calmer : Simpler(weather)) {
      if (++tries; has_changed || IsGood(Run(*play, calmer))) continue;
      weather = calmer;
      has_changed = true;
    }
    for (std::unique_ptr<Play>& simpler : play->Simpler()) {
      if (++tries; has_changed || IsGood(Run(*simpler, weather))) continue;
      play = std::move(simpler);
      has_changed = true;
      break;
    }
  }
  std::cout << "    cut down to: " << play->Describe() << "\n        " << Describe(weather) << "\n";
  const Result result = Run(*play, weather);
  for (const absl::string_view line : absl::StrSplit(result.text, '\n', absl::SkipEmpty()))
    std::cout << "        " << line << "\n";
}

class Tally {
 public:
  void Add(const Result& result) {
    ++seeds_;
    hangs_ += result.hangs;
    wrong_ += result.wrong;
    unnamed_ += result.unnamed;
    other_ += result.other;
    virtual_seconds_ += result.virtual_seconds;
    slowest_ = std::max(slowest_, result.slowest);
    if (FLAGS_hashes) {
      std::cout << absl::StrFormat("%d %016x %.3f s, %.3f s real\n", result.seed, result.trace_hash,
                                   result.virtual_seconds, result.real_seconds);
    }
    if (IsGood(result)) return;
    failed_seeds_.push_back(result.seed);
    ++failed_;
    std::cout << "FAILED --first=" << result.seed << " --seeds=1 --worlds=" << FLAGS_worlds
              << " --backends=" << FLAGS_backends << (FLAGS_play.empty() ? "" : " --play=")
              << FLAGS_play << "  " << PlayOf(result.seed)->Describe() << "\n    "
              << Describe(WeatherOf(result.seed)) << "\n";
    for (const absl::string_view line : absl::StrSplit(result.text, '\n', absl::SkipEmpty()))
      std::cout << "    " << line << "\n";
    std::cout << std::flush;
  }

  bool Print(double seconds) const {
    std::cout << absl::StrFormat(
        "%d seeds: %d failed (%d hang, %d wrong, %d do not name the guilty rank, %d otherwise); "
        "a fault is reported within %.3f s; %.0f s of virtual time in %.1f s\n",
        seeds_, failed_, hangs_, wrong_, unnamed_, other_, slowest_, virtual_seconds_, seconds);
    return failed_ == 0;
  }
  bool HasEnough() const { return failed_ >= FLAGS_most_failures; }
  const std::vector<uint64_t>& failed_seeds() const { return failed_seeds_; }

 private:
  std::vector<uint64_t> failed_seeds_;
  int seeds_ = 0, failed_ = 0, hangs_ = 0, wrong_ = 0, unnamed_ = 0, other_ = 0;
  double virtual_seconds_ = 0, slowest_ = 0;
};

int RunAll() {
  const absl::Time start = absl::Now();
  const uint64_t end = FLAGS_first + FLAGS_seeds;
  Tally tally;
  std::map<pid_t, Running> running;
  uint64_t next = FLAGS_first;
  while (next < end || !running.empty()) {
    while (next < end && static_cast<int>(running.size()) < FLAGS_jobs && !tally.HasEnough()) {
      Running one;
      const pid_t child = Start(*PlayOf(next), WeatherOf(next), one);
      ++next;
      running[child] = one;
    }
    if (running.empty()) break;
    int status = 0;
    const pid_t child = wait(&status);
    const auto found = running.find(child);
    if (found == running.end()) continue;
    tally.Add(Collect(found->second, status));
    running.erase(found);
  }
  for (const uint64_t seed : tally.failed_seeds()) {
    if (!FLAGS_cut_down) break;
    std::cout << "seed " << seed << ":\n";
    CutDown(seed);
  }
  return tally.Print(absl::ToDoubleSeconds(absl::Now() - start)) ? 0 : 1;
}

// The ranks would read the variables, and files in memory are real descriptors.
void LeaveTheShell() {
  constexpr char kMutant[] = "EVENKEEL_MUTANT";  // Of tests/mutants.sh.
  std::vector<std::string> names;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string name(*entry, std::strcspn(*entry, "="));
    if (absl::StartsWith(name, "EVENKEEL_") && name != kMutant) names.push_back(name);
  }
  for (const std::string& name : names) unsetenv(name.c_str());
  rlimit files;
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return;
  files.rlim_cur = files.rlim_max;
  (void)setrlimit(RLIMIT_NOFILE, &files);
}

int List() {
  for (uint64_t seed = FLAGS_first; seed < FLAGS_first + FLAGS_seeds; ++seed) {
    std::cout << seed << "  " << PlayOf(seed)->Describe() << "\n    " << Describe(WeatherOf(seed))
              << "\n";
  }
  return 0;
}

}  // namespace
}  // namespace evenkeel::simulation

int main(int argc, char** argv) {
  evenkeel::simulation::LeaveTheShell();
  gflags::SetUsageMessage("Runs the real code of many ranks in simulated worlds.");
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  constexpr const char* kPlays[] = {"", "fault", "program", "elastic", "replace", "balance"};
  if (std::find(std::begin(kPlays), std::end(kPlays), FLAGS_play) == std::end(kPlays)) {
    std::cerr << "simulation: --play=" << FLAGS_play
              << " is not a play; use fault, program, elastic, replace or balance\n";
    return 2;
  }
  return FLAGS_list ? evenkeel::simulation::List() : evenkeel::simulation::RunAll();
}
