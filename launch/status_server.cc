#include "evenkeel/launch/status_server.h"

#include <microhttpd.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/unique_fd.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/strict_json.h"
#include "evenkeel/launch/prometheus_text.h"
#include "nlohmann/json.hpp"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

// Longer than `status` may take: the time since the request counts.
constexpr unsigned kIdleSeconds = 6;
// The memory of a connection, for its request and the headers of the reply.
constexpr size_t kMaxMemory = 8 << 10;

// Leaves most files to the rest of this process, which may be the launcher.
unsigned MaxConnections() {
  constexpr rlim_t kMost = 256, kLeast = 8, kShare = 8;
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return kLeast;
  return static_cast<unsigned>(std::clamp(files.rlim_cur / kShare, kLeast, kMost));
}

// A gauge with a value for each rank that has one.
struct Metric {
  const char* name;
  const char* help;
  std::optional<double> (*value)(const Json& rank, const Json& steps);
};

std::optional<double> Field(const Json& object, const char* name, double unit = 1) {
  if (!object.contains(name)) return std::nullopt;
  return object[name].get<double>() * unit;
}

constexpr Metric kMetrics[] = {
    {"evenkeel_rank_connected", "Whether the rank is connected.",
     [](const Json& rank, const Json&) -> std::optional<double> {
       return rank.at("state") == "connected" ? 1 : 0;
     }},
    {"evenkeel_rank_waiting_seconds", "Since the beginning of the rank's current wait.",
     [](const Json& rank, const Json& steps) {
       return std::max(Field(rank, "waited_ms", 1e-3), Field(steps, "waited_ms", 1e-3));
     }},
    {"evenkeel_rank_silent_seconds", "Since the rank's last message.",
     [](const Json& rank, const Json&) { return Field(rank, "silent_ms", 1e-3); }},
    {"evenkeel_rank_steps", "Steps that the rank has begun.",
     [](const Json&, const Json& steps) { return Field(steps, "step"); }},
    {"evenkeel_rank_step_seconds", "Mean duration of the recent steps.",
     [](const Json&, const Json& steps) { return Field(steps, "step_ms", 1e-3); }},
    {"evenkeel_rank_cost_ratio", "Fraction of the group's recent time that it waited for the rank.",
     [](const Json&, const Json& steps) { return Field(steps, "cost"); }},
    {"evenkeel_rank_samples", "Mean number of the rank's samples in a recent step.",
     [](const Json&, const Json& steps) { return Field(steps, "samples"); }},
};

std::string GaugeHead(absl::string_view name, absl::string_view help) {
  return absl::StrCat("# HELP ", name, " ", help, "\n# TYPE ", name, " gauge\n");
}

std::string TextOf(const Json& groups) {
  const char* const failed = "evenkeel_group_failed";
  std::string text = GaugeHead(failed, "Whether the group has ended with an error.");
  for (const Json& group : groups) {
    absl::StrAppend(&text, failed,
                    "{group=", PrometheusQuoted(group.at("group").get<std::string>()), "} ",
                    group.at("error") == "" ? 0 : 1, "\n");
  }
  for (const Metric& metric : kMetrics) {
    absl::StrAppend(&text, GaugeHead(metric.name, metric.help));
    for (const Json& group : groups) {
      const std::string name = PrometheusQuoted(group.at("group").get<std::string>());
      const Json& ranks = group.at("ranks");
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        const auto value = metric.value(ranks[rank], ranks[rank].value("steps", Json::object()));
        if (!value.has_value()) continue;
        absl::StrAppend(&text, metric.name, "{group=", name, ",rank=\"", rank, "\"} ",
                        PrometheusNumber(*value), "\n");
      }
    }
  }
  return text;
}

}  // namespace

absl::StatusOr<std::string> PrometheusText(const std::string& status) {
  try {
    EK_ASSIGN_OR_RETURN(const Json groups,
                        internal::ParseStrictJson(status, /*max_depth=*/16,
                                                  "the state of the job is not as expected: it",
                                                  internal::JsonRoot::kAny));
    return TextOf(groups);
  } catch (const Json::exception& error) {
    return absl::InternalError(
        absl::StrCat("the state of the job is not as expected: ", error.what()));
  }
}

struct StatusServer::State {
  struct Reply {
    unsigned code = MHD_HTTP_OK;
    std::string body;
    const char* type = "text/plain";
  };
  Reply ReplyTo(absl::string_view method, absl::string_view path, absl::string_view proof) const;
  static MHD_Result Handle(void* self, MHD_Connection* connection, const char* path,
                           const char* method, const char* version, const char* body,
                           size_t* body_size, void** request);
  static void OnConnection(void* self, MHD_Connection* connection, void** context,
                           MHD_ConnectionNotificationCode event);

  std::string address, token;
  std::string digest;  // Of the header that proves the token.
  std::function<absl::StatusOr<std::string>()> status;
  MHD_Daemon* daemon = nullptr;
  // Used by the server's thread only.
  unsigned connections = 0;
  std::vector<MHD_Connection*> strangers;  // Without the token so far, by age.
};

StatusServer::State::Reply StatusServer::State::ReplyTo(absl::string_view method,
                                                        absl::string_view path,
                                                        absl::string_view proof) const {
  // Takes equally long for all headers of one length.
  if (!internal::IsDigest(internal::HmacSha256(token, proof), digest))
    return {.code = MHD_HTTP_UNAUTHORIZED, .body = ""};
  if (method != "GET" && method != "HEAD")
    return {.code = MHD_HTTP_METHOD_NOT_ALLOWED, .body = "only GET and HEAD\n"};
  const bool is_json = path == "/status.json";
  if (!is_json && path != "/metrics")
    return {.code = MHD_HTTP_NOT_FOUND, .body = "the paths are /status.json and /metrics\n"};
  const auto failure = [](unsigned code, const absl::Status& error) {
    return Reply{.code = code, .body = absl::StrCat(error.message(), "\n")};
  };
  absl::StatusOr<std::string> json = status();
  if (!json.ok()) return failure(MHD_HTTP_SERVICE_UNAVAILABLE, json.status());
  if (is_json) return {.body = *std::move(json), .type = "application/json"};
  absl::StatusOr<std::string> text = PrometheusText(*json);
  if (!text.ok()) return failure(MHD_HTTP_INTERNAL_SERVER_ERROR, text.status());
  return {.body = *std::move(text), .type = "text/plain; version=0.0.4"};
}

// libmicrohttpd calls it when the headers of a request have arrived. A reply at that moment is the
// only one of the connection, whatever the client sends then.
MHD_Result StatusServer::State::Handle(void* self, MHD_Connection* connection, const char* path,
                                       const char* method, const char* /*version*/,
                                       const char* /*body*/, size_t* /*body_size*/,
                                       void** /*request*/) {
  const char* proof = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Authorization");
  auto* const state = static_cast<State*>(self);
  const Reply reply = state->ReplyTo(method, path, proof == nullptr ? "" : proof);
  if (reply.code != MHD_HTTP_UNAUTHORIZED) std::erase(state->strangers, connection);
  MHD_Response* const response = MHD_create_response_from_buffer(
      reply.body.size(), const_cast<char*>(reply.body.data()), MHD_RESPMEM_MUST_COPY);
  if (response == nullptr) return MHD_NO;
  const absl::Cleanup release = [&] { MHD_destroy_response(response); };
  MHD_add_response_header(response, "Content-Type", reply.type);
  MHD_add_response_header(response, "Connection", "close");
  if (reply.code == MHD_HTTP_UNAUTHORIZED)
    MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
  if (reply.code == MHD_HTTP_METHOD_NOT_ALLOWED)
    MHD_add_response_header(response, "Allow", "GET, HEAD");
  return MHD_queue_response(connection, reply.code, response);
}

// A request that comes byte by byte is never idle. So before a connection would have to wait for a
// place, the oldest one without the token is closed.
void StatusServer::State::OnConnection(void* self, MHD_Connection* connection, void** /*context*/,
                                       MHD_ConnectionNotificationCode event) {
  auto* const state = static_cast<State*>(self);
  if (event == MHD_CONNECTION_NOTIFY_CLOSED) {
    --state->connections;
    std::erase(state->strangers, connection);
    return;
  }
  state->strangers.push_back(connection);
  if (++state->connections < MaxConnections()) return;
  MHD_Connection* const oldest = state->strangers.front();
  state->strangers.erase(state->strangers.begin());
  shutdown(MHD_get_connection_info(oldest, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd,
           SHUT_RDWR);
}

absl::StatusOr<std::unique_ptr<StatusServer>> StatusServer::Create(
    const Options& options, std::function<absl::StatusOr<std::string>()> status) {
  if (options.token.empty())
    return absl::InvalidArgumentError("the status server needs a token: set EVENKEEL_STATUS_TOKEN");
  EK_ASSIGN_OR_RETURN(const internal::HostPort address, internal::HostPort::Parse(options.address));
  EK_ASSIGN_OR_RETURN(internal::UniqueFd listener, internal::ListenOn(address));
  EK_ASSIGN_OR_RETURN(const internal::HostPort local, internal::LocalAddress(listener));
  auto state = std::make_unique<State>();
  state->address = local.ToString();
  state->token = options.token;
  state->digest = internal::HmacSha256(options.token, absl::StrCat("Bearer ", options.token));
  state->status = std::move(status);
  // The daemon closes the listener, also in most cases in which it does not start; in the others it
  // stays open, because closing it twice may close a file of another thread.
  state->daemon =
      MHD_start_daemon(MHD_USE_EPOLL_INTERNAL_THREAD | MHD_USE_ITC, 0, nullptr, nullptr,
                       &State::Handle, state.get(), MHD_OPTION_LISTEN_SOCKET, listener.Release(),
                       MHD_OPTION_NOTIFY_CONNECTION, &State::OnConnection, state.get(),  //
                       MHD_OPTION_CONNECTION_LIMIT, MaxConnections(),                    //
                       MHD_OPTION_CONNECTION_TIMEOUT, kIdleSeconds,                      //
                       MHD_OPTION_CONNECTION_MEMORY_LIMIT, kMaxMemory, MHD_OPTION_END);
  if (state->daemon == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("the status server at ", state->address, " cannot start its thread"));
  }
  return absl::WrapUnique(new StatusServer(std::move(state)));
}

StatusServer::StatusServer(std::unique_ptr<State> state) : state_(std::move(state)) {}

StatusServer::~StatusServer() { MHD_stop_daemon(state_->daemon); }

const std::string& StatusServer::address() const { return state_->address; }

}  // namespace evenkeel
