#include "evenkeel/trainer/app/share_log.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/version.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/trainer/app/metrics.h"
#include "evenkeel/trainer/layers/compute_threads.h"

namespace evenkeel {
namespace {

// By the number of steps before them.
using Shares = std::map<int64_t, std::vector<int64_t>>;

std::string ProcessorName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::pair<absl::string_view, absl::string_view> field =
        absl::StrSplit(line, absl::MaxSplits(':', 1));
    if (absl::StartsWith(field.first, "model name"))
      return std::string(absl::StripAsciiWhitespace(field.second));
  }
  return "unknown";
}

// Returns one value if all ranks have the same.
std::string OfAllRanks(const std::vector<std::string>& values) {
  const bool are_equal = std::ranges::count(values, values[0]) == std::ssize(values);
  return are_equal ? values[0] : absl::StrJoin(values, " | ");
}

absl::StatusOr<MetricsFields> HeaderOf(Communicator& comm, const TrainOptions& options) {
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> processors,
                      AgreeOn(comm, "processor", absl::OkStatus(), ProcessorName()));
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> threads,
                      AgreeOn(comm, "threads", absl::OkStatus(), absl::StrCat(ComputeThreads())));
  return MetricsFields{{"build", std::string(kBuild)},
                       {"processor", OfAllRanks(processors)},
                       {"ranks", comm.world_size()},
                       {"threads", OfAllRanks(threads)},
                       {"backend", std::string(comm.backend_name())},
                       {"seed", options.flags.seed},
                       {"batch", comm.world_size() * options.samples_per_step()}};
}

absl::Status CheckHeader(const MetricsFields& header, const MetricsFields& own) {
  for (const auto& [name, value] : own.items()) {
    const MetricsFields found = header.value(name, MetricsFields());
    if (found == value) continue;
    return absl::InvalidArgumentError(absl::StrCat("is of a run with ", name, " ", found.dump(),
                                                   ", but this run has ", value.dump()));
  }
  return absl::OkStatus();
}

bool IsCount(const MetricsFields& value, int64_t most) {
  return value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(most);
}

// Reads a log with the header `own`, without the changes that a later line replaces.
absl::StatusOr<Shares> ParseShares(absl::string_view text, const MetricsFields& own) {
  Shares shares;
  bool is_first = true;
  // A killed run may not have finished the last line.
  text = text.substr(0, text.rfind('\n') + 1);
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const MetricsFields fields = MetricsFields::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!fields.is_object())
      return absl::InvalidArgumentError(absl::StrCat("has a damaged line: ", line));
    if (std::exchange(is_first, false)) {
      EK_RETURN_IF_ERROR(CheckHeader(fields, own));
      continue;
    }
    const MetricsFields step = fields.value("step", MetricsFields());
    const MetricsFields of_step = fields.value("shares", MetricsFields());
    // Sums of shares do not overflow.
    const auto is_share = [](const MetricsFields& value) {
      return IsCount(value, std::numeric_limits<int32_t>::max());
    };
    if (!IsCount(step, std::numeric_limits<int64_t>::max()) || !of_step.is_array() ||
        !std::all_of(of_step.begin(), of_step.end(), is_share))
      return absl::InvalidArgumentError(absl::StrCat("has a damaged line: ", line));
    shares.erase(shares.lower_bound(step.get<int64_t>()), shares.end());
    shares[step.get<int64_t>()] = of_step.get<std::vector<int64_t>>();
  }
  if (is_first) return absl::InvalidArgumentError("is not a --balance_log file");
  return shares;
}

absl::StatusOr<internal::UniqueFd> Lock(const std::string& path) {
  internal::UniqueFd file(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
  if (!file) return ErrnoStatus("cannot open", path);
  if (flock(file.get(), LOCK_EX | LOCK_NB) == 0) return file;
  if (errno != EWOULDBLOCK) return ErrnoStatus("cannot lock", path);
  return absl::FailedPreconditionError(
      "another run is writing to it; wait until that ends, or pass another file");
}

// Writes the first line, or compares with that of an earlier attempt.
absl::Status Begin(const std::string& path, const MetricsFields& own) {
  const absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok() && !absl::IsNotFound(text.status())) return text.status();
  if (text.ok() && !text->empty()) {
    if (const absl::Status status = ParseShares(*text, own).status(); !status.ok()) {
      return WithMessage(status, absl::StrCat(status.message(),
                                              "; pass another --balance_log, or delete the file"));
    }
    if (truncate(path.c_str(), static_cast<off_t>(text->rfind('\n') + 1)) == 0)
      return absl::OkStatus();
    return ErrnoStatus("cannot shorten", path);
  }
  EK_ASSIGN_OR_RETURN(const auto writer, MetricsWriter::Create(path));
  return writer->Write(own);
}

absl::StatusOr<std::vector<ShareChange>> Read(const std::string& path, const MetricsFields& own,
                                              int64_t first_step) {
  EK_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  EK_ASSIGN_OR_RETURN(const Shares shares, ParseShares(text, own));
  const auto ranks = own.at("ranks").get<size_t>();
  std::vector<ShareChange> changes;
  if (ranks == 1) return changes;  // There is no other share.
  for (const auto& [step, of_step] : shares) {
    if (of_step.size() != ranks) {
      return absl::InvalidArgumentError(
          absl::StrCat("divides the batch between ", of_step.size(),
                       of_step.size() == 1 ? " rank" : " ranks", ", but this run has ", ranks,
                       " (after step ", step, "); a run that lost ranks cannot be repeated"));
    }
    if (step <= first_step) changes.clear();
    changes.push_back({.reduction = std::max<int64_t>(0, step - first_step), .shares = of_step});
  }
  if (!changes.empty() && changes[0].reduction == 0) return changes;
  return absl::InvalidArgumentError(absl::StrCat("has no shares of step ", first_step + 1));
}

std::string Serialize(const std::vector<ShareChange>& changes) {
  MetricsFields all = MetricsFields::array();
  for (const ShareChange& change : changes) all.push_back({change.reduction, change.shares});
  return all.dump();
}

}  // namespace

absl::StatusOr<ShareLog> OpenShareLog(Communicator& comm, const TrainOptions& options,
                                      int64_t first_step) {
  const std::string& log = options.flags.balance_log;
  const std::string& repeat = options.flags.balance_repeat;
  ShareLog opened;
  // Without paths, too: those of rank 0 may be set.
  if (!options.flags.balance) return opened;
  EK_ASSIGN_OR_RETURN(const MetricsFields own, HeaderOf(comm, options));
  absl::Status status;
  if (comm.rank() == 0 && !repeat.empty()) {
    absl::StatusOr<std::vector<ShareChange>> read = Read(repeat, own, first_step);
    status = Annotate(read.status(), absl::StrCat("--balance_repeat=", repeat));
    if (read.ok()) opened.repeat = *std::move(read);
  }
  if (comm.rank() == 0 && !log.empty() && status.ok()) {
    absl::StatusOr<internal::UniqueFd> lock = Lock(log);
    status = lock.ok() ? Begin(log, own) : lock.status();
    status = Annotate(status, absl::StrCat("--balance_log=", log));
    if (lock.ok()) opened.lock = *std::move(lock);
  }
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                      AgreeOn(comm, "shares", status, Serialize(opened.repeat)));
  opened.repeat.clear();
  for (const MetricsFields& change : MetricsFields::parse(all[0])) {
    opened.repeat.push_back(
        {.reduction = change[0].get<int64_t>(), .shares = change[1].get<std::vector<int64_t>>()});
  }
  return opened;
}

absl::Status WriteShares(const std::string& path, int64_t step,
                         const std::vector<int64_t>& shares) {
  EK_ASSIGN_OR_RETURN(const auto writer, MetricsWriter::Create(path, MetricsMode::kAppend));
  return writer->Write({{"step", step}, {"shares", shares}});
}

absl::Status EndShareLog(const Communicator& comm, const TrainOptions& options, int64_t step) {
  const std::string& log = options.flags.balance_log;
  std::error_code error;
  if (log.empty() || !std::filesystem::exists(log, error)) return absl::OkStatus();
  return WriteShares(log, step,
                     std::vector<int64_t>(comm.world_size(), options.samples_per_step()));
}

}  // namespace evenkeel
