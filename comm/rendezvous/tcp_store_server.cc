#include "evenkeel/comm/rendezvous/tcp_store_server.h"

#include <utility>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/control/groups.h"
#include "evenkeel/comm/control/server_loop.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

absl::StatusOr<std::unique_ptr<TcpStoreServer>> TcpStoreServer::Create(
    const TcpStoreServerOptions& options) {
  if (options.secret.empty())
    return absl::InvalidArgumentError("the server of the job's store needs the job's secret");
  if (options.job.size() > internal::kMaxName) {
    return absl::InvalidArgumentError(absl::StrCat("the job's name has ", options.job.size(),
                                                   " bytes, at most ", internal::kMaxName,
                                                   " are allowed"));
  }
  EK_ASSIGN_OR_RETURN(internal::HostPort address, internal::HostPort::Parse(options.address));
  EK_ASSIGN_OR_RETURN(internal::UniqueFd listener, internal::ListenOn(address));
  EK_ASSIGN_OR_RETURN(const internal::HostPort local, internal::LocalAddress(listener));
  EK_ASSIGN_OR_RETURN(internal::WakeUp wake, internal::WakeUp::Create());
  address.port = local.port;
  auto loop = std::make_unique<internal::ServerLoop>(
      std::move(listener), std::move(wake),
      internal::ServerOptions{.job = {options.job, options.secret},
                              .world_size = options.world_size,
                              .host = options.host,
                              .greeting_timeout = options.greeting_timeout,
                              .linger = options.linger},
      [](internal::ControlSeats::SendFunction send) {
        return std::make_unique<internal::ControlGroups>(std::move(send));
      });
  return absl::WrapUnique(new TcpStoreServer(std::move(loop), address.ToString(), address.port,
                                             internal::IsLoopback(local.host)));
}

TcpStoreServer::TcpStoreServer(std::unique_ptr<internal::ServerLoop> loop, std::string address,
                               int port, bool is_on_loopback)
    : address_(std::move(address)),
      port_(port),
      is_on_loopback_(is_on_loopback),
      loop_(std::move(loop)),
      thread_([this] { loop_->Run(); }) {}

TcpStoreServer::~TcpStoreServer() {
  loop_->Stop();
  thread_.join();
}

}  // namespace evenkeel
