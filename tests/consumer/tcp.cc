// Two processes find each other over TCP and add up a vector with Gloo.

#include "evenkeel/comm/tcp/tcp.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/rendezvous/tcp_store.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/comm/status.h"

namespace {

constexpr int kWorldSize = 2;
constexpr char kSecret[] = "known to both, because one forked the other";

absl::Status AddUp(int rank, const std::string& address) {
  evenkeel::TcpStoreOptions store{.addresses = {address},
                                  .secret = kSecret,
                                  .rank = rank,
                                  .world_size = kWorldSize,
                                  .timeout = absl::Seconds(30)};
  EK_ASSIGN_OR_RETURN(std::unique_ptr<evenkeel::TcpControlLink> link,
                      evenkeel::TcpControlLink::Connect(store));
  EK_ASSIGN_OR_RETURN(std::unique_ptr<evenkeel::Communicator> comm,
                      evenkeel::CreateTcpGroup(rank, kWorldSize, std::move(link)));

  std::vector<float> data(1000, 1.0f + static_cast<float>(rank));
  EK_RETURN_IF_ERROR(comm->AllReduce(absl::MakeSpan(data), evenkeel::ReduceOp::kSum));
  if (std::count(data.begin(), data.end(), 3.0f) != 1000)
    return absl::InternalError("1 + 2 is not 3");
  return comm->Finalize(absl::Seconds(30));
}

// Rank 0 hosts the server and tells its address through the pipe.
absl::Status Host(int pipe) {
  EK_ASSIGN_OR_RETURN(
      std::unique_ptr<evenkeel::TcpStoreServer> server,
      evenkeel::TcpStoreServer::Create({.secret = kSecret, .world_size = kWorldSize}));
  const std::string& address = server->address();
  if (write(pipe, address.data(), address.size()) < 0)
    return absl::UnavailableError("rank 1 is gone");
  close(pipe);
  return AddUp(0, address);
}

absl::Status Join(int pipe) {
  char address[256];
  const ssize_t size = read(pipe, address, sizeof(address));
  if (size <= 0) return absl::UnavailableError("rank 0 is gone");
  return AddUp(1, std::string(address, size));
}

bool Succeeded(int rank, const absl::Status& status) {
  if (!status.ok()) std::fprintf(stderr, "rank %d: %s\n", rank, status.ToString().c_str());
  return status.ok();
}

}  // namespace

int main() {
  int ends[2];
  if (pipe(ends) != 0) return 1;
  const pid_t child = fork();
  if (child == 0) {
    close(ends[1]);
    _exit(Succeeded(1, Join(ends[0])) ? 0 : 1);
  }
  close(ends[0]);
  const bool hosted = Succeeded(0, Host(ends[1]));
  int child_status = 1;
  waitpid(child, &child_status, 0);
  if (!hosted || child_status != 0) return 1;
  std::printf("2 processes added up\n");
  return 0;
}
