#include "evenkeel/comm/rendezvous/tcp_store_server.h"

#include <sys/resource.h>

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/control/groups.h"
#include "evenkeel/comm/control/server_loop.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

// Each rank has a connection to the store and one to the hub of each of its groups, or one for all
// of them. The usual limit of 1024 open files would be met by 500 ranks, which would then find no
// store.
absl::Status internal::PrepareForRanks(int world_size) {
  constexpr rlim_t kLeastPerRank = 2, kGoodPerRank = 8, kOthers = 256;
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return absl::OkStatus();
  const rlim_t least = kLeastPerRank * world_size, good = kGoodPerRank * world_size + kOthers;
  if (files.rlim_cur < good) {
    files.rlim_cur = std::min(files.rlim_max, good);
    setrlimit(RLIMIT_NOFILE, &files);
  }
  if (files.rlim_cur >= least) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "the store of a job of ", world_size, " ranks needs more than ", least,
      " open files in its process, which may have ", files.rlim_max,
      ": raise the hard limit of open files there (ulimit -Hn, or LimitNOFILE of the service)"));
}

absl::StatusOr<std::unique_ptr<TcpStoreServer>> TcpStoreServer::Create(
    const TcpStoreServerOptions& options) {
  if (options.secret.empty())
    return absl::InvalidArgumentError("the server of the job's store needs the job's secret");
  if (options.job.size() > internal::kMaxName) {
    return absl::InvalidArgumentError(absl::StrCat("the job's name has ", options.job.size(),
                                                   " bytes, at most ", internal::kMaxName,
                                                   " are allowed"));
  }
  if (options.world_size > 0) EK_RETURN_IF_ERROR(internal::PrepareForRanks(options.world_size));
  EK_ASSIGN_OR_RETURN(internal::HostPort address, internal::HostPort::Parse(options.address));
  EK_ASSIGN_OR_RETURN(internal::UniqueFd listener, internal::ListenOn(address));
  EK_ASSIGN_OR_RETURN(const internal::HostPort local, internal::LocalAddress(listener));
  address.port = local.port;
  EK_ASSIGN_OR_RETURN(auto loop,
                      internal::ServerLoop::Create(
                          std::move(listener),
                          internal::ServerOptions{.job = {options.job, options.secret},
                                                  .world_size = options.world_size,
                                                  .host = options.host,
                                                  .greeting_timeout = options.greeting_timeout,
                                                  .linger = options.linger,
                                                  .refuse_after = options.refuse_after},
                          [&options](internal::ControlSeats::SendFunction send) {
                            return std::make_unique<internal::ControlGroups>(std::move(send),
                                                                             options.on_group);
                          }));
  auto server = absl::WrapUnique(new TcpStoreServer(
      std::move(loop), address.ToString(), address.port, internal::IsLoopback(local.host)));
  EK_ASSIGN_OR_RETURN(
      server->thread_,
      internal::StartThread("the job's store", [raw = server.get()] { raw->loop_->Run(); }));
  return server;
}

TcpStoreServer::TcpStoreServer(std::unique_ptr<internal::ServerLoop> loop, std::string address,
                               int port, bool is_on_loopback)
    : address_(std::move(address)),
      port_(port),
      is_on_loopback_(is_on_loopback),
      loop_(std::move(loop)) {}

TcpStoreServer::~TcpStoreServer() {
  loop_->Stop();
  if (thread_.joinable()) thread_.join();
}

}  // namespace evenkeel
