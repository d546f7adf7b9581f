#include "evenkeel/tests/shm_faults/rank.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tests/child_processes.h"

namespace evenkeel {
namespace {

CommunicatorOptions WithWatch() {
  CommunicatorOptions options;
  options.timeout = absl::Seconds(30);
  options.watch = {.beat = absl::Milliseconds(100),
                   .silence = absl::Seconds(2),
                   .stall_warning = absl::Seconds(20)};
  return options;
}

// In one piece: all ranks write there.
void Say(absl::string_view what) {
  const std::string line = absl::StrCat(what, "\n");
  (void)!write(STDOUT_FILENO, line.data(), line.size());
}

void AwaitWord() {
  char word = 0;
  (void)!read(STDIN_FILENO, &word, 1);
}

absl::StatusOr<std::unique_ptr<Communicator>> Create() {
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  return CreateCommunicator(environment, {.backend = "shm", .communicator = WithWatch()});
}

absl::StatusOr<TensorView> Registered(Communicator& comm, int64_t elements,
                                      std::vector<Memory>& owner) {
  EK_ASSIGN_OR_RETURN(Memory memory, comm.Allocate(elements * static_cast<int64_t>(sizeof(float))));
  owner.push_back(memory);
  return TensorView(memory.data.get(), elements, DType::kFloat32);
}

absl::Status ExpectAll(TensorView data, float expected, absl::string_view what) {
  const auto values = data.as<float>();
  const auto wrong =
      std::find_if(values.begin(), values.end(), [&](float value) { return value != expected; });
  if (wrong == values.end()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(what, ": element ", wrong - values.begin(), " is ",
                                          *wrong, ", expected ", expected));
}

// Shared memory in this process's address space or among its files.
int SharedPieces() {
  int pieces = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    pieces += absl::StrContains(line, "memfd:evenkeel");
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    pieces += absl::StrContains(std::filesystem::read_symlink(entry.path(), error).string(),
                                "memfd:evenkeel");
  }
  return pieces;
}

// ---- Stopped ------------------------------------------------------------------------------------

// Sums of ones, so that what others put in their memory later would show.
absl::Status RunStopped(absl::string_view kind, int64_t elements) {
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm, Create());
  const int world = comm->world_size();
  const float pattern = static_cast<float>(1000 + comm->rank());
  std::vector<Memory> owner;
  EK_ASSIGN_OR_RETURN(const TensorView in, Registered(*comm, elements, owner));
  EK_ASSIGN_OR_RETURN(const TensorView out,
                      Registered(*comm, elements * (kind == "all_gather" ? world : 1), owner));
  absl::Status failed;
  for (int round = 0; failed.ok(); ++round) {
    if (round == 1) Say("running");
    if (kind == "all_gather") {  // Little else, so that the signal comes in the middle of it.
      if (round == 0) std::fill_n(in.as<float>().begin(), elements, 1.0f);
      failed = comm->AllGather(in, out);
      for (int64_t i = 0; failed.ok() && i < out.count; i += 1024) {
        EK_RETURN_IF_ERROR(ExpectAll(out.Slice(i, 1), 1, "all_gather"));
      }
    } else {
      std::fill_n(in.as<float>().begin(), elements, 1.0f);
      failed = comm->AllReduce(in, ReduceOp::kSum);
      if (failed.ok()) EK_RETURN_IF_ERROR(ExpectAll(in, world, "all_reduce"));
    }
  }
  for (const TensorView& view : {in, out})
    std::fill_n(view.as<float>().begin(), view.count, pattern);
  Say(absl::StrCat("failed ", failed.message()));
  AwaitWord();
  for (const TensorView& view : {in, out})
    EK_RETURN_IF_ERROR(ExpectAll(view, pattern, "the memory was changed"));
  Say("intact");
  return absl::OkStatus();
}

// ---- Killed -------------------------------------------------------------------------------------

// All kinds of collectives, the same on all ranks, over some of two buffers.
absl::Status Mixed(Communicator& comm, uint64_t seed, TensorView a, TensorView b) {
  const int world = comm.world_size();
  const auto draw = [&seed](int64_t below) {
    seed = StableHash(seed, uint64_t{1});
    return static_cast<int64_t>(seed % static_cast<uint64_t>(below));
  };
  const int64_t count =
      std::min<int64_t>((256 << draw(15)) + draw(100), a.count / world);  // 1 KiB to 16 MiB.
  const int root = static_cast<int>(draw(world));
  switch (draw(6)) {
    case 0:
      return comm.AllGather(a.Slice(0, count), b.Slice(0, world * count));
    case 1:
      return comm.ReduceScatter(a.Slice(0, world * count), b.Slice(0, count), ReduceOp::kMax);
    case 2:
      return comm.Broadcast(a.Slice(0, count), root);
    case 3:
      return comm.user().AllToAll(a.Slice(0, world * count), b.Slice(0, world * count)).Wait();
    default:
      return comm.AllReduce(a.Slice(0, count), ReduceOp::kMax);
  }
}

absl::Status CheckSums(Communicator& comm, TensorView data) {
  std::fill_n(data.as<float>().begin(), data.count, 1.0f);
  EK_RETURN_IF_ERROR(comm.AllReduce(data, ReduceOp::kSum));
  return ExpectAll(data, static_cast<float>(comm.world_size()), "after the failure");
}

absl::Status RunKilled(uint64_t seed) {
  constexpr int64_t kElements = 5 << 20;
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm, Create());
  {
    std::vector<Memory> owner;
    std::vector<float> plain(2 * kElements, 1);
    EK_ASSIGN_OR_RETURN(const TensorView a, Registered(*comm, kElements, owner));
    EK_ASSIGN_OR_RETURN(const TensorView b, Registered(*comm, kElements, owner));
    const TensorView plain_a(plain.data(), kElements, DType::kFloat32);
    const TensorView plain_b(plain.data() + kElements, kElements, DType::kFloat32);
    absl::Status failed;
    for (uint64_t round = 0; failed.ok(); ++round) {
      if (round == 3) Say("running");
      const uint64_t drawn = StableHash(seed, round);
      failed = drawn >> 63 ? Mixed(*comm, drawn, a, b) : Mixed(*comm, drawn, plain_a, plain_b);
    }
    Say(absl::StrCat("failed ", failed.message()));
    EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> next, comm->Shrink(absl::Seconds(20)));
    comm = std::move(next);
    EK_ASSIGN_OR_RETURN(const TensorView fresh, Registered(*comm, kElements, owner));
    for (const TensorView& data : {a, fresh, plain_a, b})
      EK_RETURN_IF_ERROR(CheckSums(*comm, data));
    EK_RETURN_IF_ERROR(comm->Finalize());
    comm.reset();
  }
  if (const int pieces = SharedPieces(); pieces > 0) {
    return absl::InternalError(absl::StrCat(pieces, " pieces of shared memory are left"));
  }
  Say("ended");
  return absl::OkStatus();
}

// ---- Without file descriptors -------------------------------------------------------------------

// While it lives, nothing can be opened.
class NoFiles {
 public:
  NoFiles() {
    getrlimit(RLIMIT_NOFILE, &before_);
    const int next = dup(STDIN_FILENO);
    close(next);
    // A lower limit would keep poll() from looking at those that are open.
    const rlimit none = {.rlim_cur = static_cast<rlim_t>(next), .rlim_max = before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoFiles() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_;
};

absl::Status RunWithoutFiles(absl::string_view what) {
  constexpr int64_t kElements = 1 << 20;
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm, Create());
  const bool has_none = comm->rank() == 1;
  std::unique_ptr<NoFiles> no_files;
  std::vector<Memory> owner;
  std::vector<float> plain(kElements, 1);
  TensorView data(plain.data(), kElements, DType::kFloat32);
  if (what == "give") {
    EK_ASSIGN_OR_RETURN(data, Registered(*comm, kElements, owner));
  }
  EK_RETURN_IF_ERROR(comm->Barrier());
  if (has_none) no_files = std::make_unique<NoFiles>();
  if (what == "allocate" && has_none) {
    const absl::StatusOr<Memory> memory = comm->Allocate(kElements);
    if (memory.status().code() != absl::StatusCode::kResourceExhausted) {
      return absl::InternalError(absl::StrCat("Allocate: ", memory.status().ToString()));
    }
    no_files.reset();
  }
  for (int i = 0; what == "channels" && i < 50; ++i) {
    EK_ASSIGN_OR_RETURN(Channel* const channel, comm->OpenChannel(absl::StrCat("c", i)));
    EK_RETURN_IF_ERROR(channel->AllReduce(data, ReduceOp::kMax).Wait());
  }
  std::fill_n(data.as<float>().begin(), data.count, 1.0f);
  // In "give", a broadcast makes sure that rank 1 needs the memory given to it.
  const absl::Status status =
      what == "give" ? comm->Broadcast(data, 0) : comm->AllReduce(data, ReduceOp::kSum);
  no_files.reset();
  if (!status.ok()) std::fill_n(data.as<float>().begin(), data.count, 7.0f);
  Say(absl::StrCat("status ", status.ToString()));
  AwaitWord();
  return ExpectAll(data, status.ok() ? 2 : 7, "the memory was changed");
}

}  // namespace

absl::Status RunShmRank(const std::vector<std::string>& arguments) {
  EndWithParent();
  int64_t number = 0;
  if (arguments.size() == 3 && arguments[0] == "stopped" &&
      absl::SimpleAtoi(arguments[2], &number)) {
    return RunStopped(arguments[1], number);
  }
  if (arguments.size() == 2 && arguments[0] == "killed" &&
      absl::SimpleAtoi(arguments[1], &number)) {
    return RunKilled(number);
  }
  if (arguments.size() == 2 && arguments[0] == "no_files") return RunWithoutFiles(arguments[1]);
  return absl::InvalidArgumentError("what is a rank to do?");
}

}  // namespace evenkeel
