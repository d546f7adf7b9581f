#include "evenkeel/libtorch/testing/ranks.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "absl/strings/str_cat.h"

namespace evenkeel::libtorch {
namespace {

constexpr int kSecondsToEnd = 90;

[[noreturn]] void BeRank(int rank, int world, const std::string& folder,
                         const std::function<void(Group&)>& body, const GroupOptions& options) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(kSecondsToEnd);
  for (const char* name : {"RANK", "LOCAL_RANK"}) setenv(name, absl::StrCat(rank).c_str(), 1);
  for (const char* name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"})
    setenv(name, absl::StrCat(world).c_str(), 1);
  setenv("EVENKEEL_STORE", folder.c_str(), 1);
  setenv("EVENKEEL_SECRET", "secret of a test", 1);
  if (freopen(absl::StrCat(folder, "/stderr.", rank).c_str(), "w", stderr) == nullptr) _exit(2);
  torch::set_num_threads(1);
  const int code = run(body, options);
  std::fflush(stderr);
  _exit(code);
}

std::string Contents(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

Endings RunRanks(int world, const std::function<void(Group&)>& body, const GroupOptions& options) {
  std::string folder = std::filesystem::temp_directory_path() / "libtorchXXXXXX";
  if (mkdtemp(folder.data()) == nullptr) throw std::runtime_error("no folder " + folder);
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < world; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) BeRank(rank, world, folder, body, options);
    ranks.push_back(pid);
  }
  Endings endings;
  for (int rank = 0; rank < world; ++rank) {
    int status = 0;
    waitpid(ranks[rank], &status, 0);
    const std::string text = Contents(absl::StrCat(folder, "/stderr.", rank));
    endings.push_back(status == 0 ? ""
                      : WIFSIGNALED(status)
                          ? absl::StrCat("signal ", WTERMSIG(status), ": ", text)
                          : absl::StrCat("exit ", WEXITSTATUS(status), ": ", text));
  }
  std::filesystem::remove_all(folder);
  return endings;
}

void Require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("it does not hold that " + what);
}

void RequireSame(const torch::Tensor& got, const torch::Tensor& want, const std::string& what) {
  if (torch::equal(got, want)) return;
  throw std::runtime_error(c10::str(what, ": got ", got, "\nexpected ", want));
}

void RequireError(const std::function<void()>& call, const std::string& part) {
  try {
    call();
  } catch (const Error& error) {
    if (std::string(error.what()).find(part) != std::string::npos) return;
    throw std::runtime_error("expected an error with \"" + part + "\", got: " + error.what());
  }
  throw std::runtime_error("expected an error with \"" + part + "\"");
}

void RequireReplicas(Group& group, const torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  const auto check = [&](const std::string& name, const torch::Tensor& tensor) {
    torch::Tensor first = tensor.clone();
    group.broadcast(first);
    RequireSame(tensor, first, name + " differs from that of rank 0");
  };
  for (const auto& item : module.named_parameters()) check(item.key(), item.value());
  for (const auto& item : module.named_buffers()) check(item.key(), item.value());
}

}  // namespace evenkeel::libtorch
