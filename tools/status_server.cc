#include "evenkeel/tools/status_server.h"

#include <microhttpd.h>

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/unique_fd.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

constexpr unsigned kIdleSeconds = 2;
constexpr unsigned kMaxConnections = 1000;
// Of a connection: its request and the headers of the reply.
constexpr size_t kMaxMemory = 8 << 10;

// Takes equally long wherever the texts differ.
bool AreEqual(absl::string_view a, absl::string_view b) {
  unsigned difference = a.size() != b.size() ? 1 : 0;
  for (size_t i = 0; i < a.size(); ++i)
    difference |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i % b.size()]);
  return difference == 0;
}

// A label's value in quotes.
std::string Quoted(absl::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '\\' || c == '"') quoted += '\\';
    quoted += c == '\n' ? ' ' : c;
  }
  return quoted + "\"";
}

struct Metric {
  const char* name;
  const char* help;
  const char* field;  // Of a rank,
  bool is_of_steps;   // or of its steps.
  double unit;
};

constexpr Metric kMetrics[] = {
    {"evenkeel_rank_waiting_seconds", "Since the beginning of the rank's current wait.",
     "waited_ms", false, 1e-3},
    {"evenkeel_rank_silent_seconds", "Since the rank's last message.", "silent_ms", false, 1e-3},
    {"evenkeel_rank_steps", "Steps that the rank has begun.", "step", true, 1},
    {"evenkeel_rank_step_seconds", "Mean duration of the recent steps.", "step_ms", true, 1e-3},
    {"evenkeel_rank_cost_ratio", "Fraction of the group's recent time that it waited for the rank.",
     "cost", true, 1},
};

}  // namespace

std::string PrometheusText(const Json& status) {
  std::string text =
      "# HELP evenkeel_group_failed Whether the group has ended with an error.\n"
      "# TYPE evenkeel_group_failed gauge\n";
  for (const Json& group : status) {
    absl::StrAppend(&text,
                    "evenkeel_group_failed{group=", Quoted(group.at("group").get<std::string>()),
                    "} ", group.at("error") == "" ? 0 : 1, "\n");
  }
  absl::StrAppend(&text, "# HELP evenkeel_rank_connected Whether the rank is connected.\n",
                  "# TYPE evenkeel_rank_connected gauge\n");
  const auto labels = [](const Json& group, size_t rank) {
    return absl::StrCat("{group=", Quoted(group.at("group").get<std::string>()), ",rank=\"", rank,
                        "\"} ");
  };
  for (const Json& group : status) {
    const Json& ranks = group.at("ranks");
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      absl::StrAppend(&text, "evenkeel_rank_connected", labels(group, rank),
                      ranks[rank].at("state") == "connected" ? 1 : 0, "\n");
    }
  }
  for (const Metric& metric : kMetrics) {
    absl::StrAppend(&text, "# HELP ", metric.name, " ", metric.help, "\n# TYPE ", metric.name,
                    " gauge\n");
    for (const Json& group : status) {
      const Json& ranks = group.at("ranks");
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        const Json& of =
            metric.is_of_steps ? ranks[rank].value("steps", Json::object()) : ranks[rank];
        if (!of.contains(metric.field)) continue;
        absl::StrAppendFormat(&text, "%s%s%.6g\n", metric.name, labels(group, rank),
                              of[metric.field].get<double>() * metric.unit);
      }
    }
  }
  return text;
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

  std::string address, token;
  std::function<absl::StatusOr<std::string>()> status;
  MHD_Daemon* daemon = nullptr;
};

StatusServer::State::Reply StatusServer::State::ReplyTo(absl::string_view method,
                                                        absl::string_view path,
                                                        absl::string_view proof) const {
  if (!AreEqual(proof, token)) return {.code = MHD_HTTP_UNAUTHORIZED, .body = ""};
  if (method != "GET") return {.code = MHD_HTTP_METHOD_NOT_ALLOWED, .body = "only GET\n"};
  const bool is_json = path == "/status.json";
  if (!is_json && path != "/metrics")
    return {.code = MHD_HTTP_NOT_FOUND, .body = "here are /status.json and /metrics\n"};
  absl::StatusOr<std::string> json = status();
  if (!json.ok()) {
    return {.code = MHD_HTTP_SERVICE_UNAVAILABLE,
            .body = absl::StrCat(json.status().message(), "\n")};
  }
  if (is_json) return {.body = *std::move(json), .type = "application/json"};
  return {.body = PrometheusText(Json::parse(*json)), .type = "text/plain; version=0.0.4"};
}

// libmicrohttpd calls it when it has the headers. A reply then ends the connection, whatever the
// client still sends.
MHD_Result StatusServer::State::Handle(void* self, MHD_Connection* connection, const char* path,
                                       const char* method, const char* /*version*/,
                                       const char* /*body*/, size_t* /*body_size*/,
                                       void** /*request*/) {
  const char* proof = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Authorization");
  const Reply reply =
      static_cast<const State*>(self)->ReplyTo(method, path, proof == nullptr ? "" : proof);
  MHD_Response* const response = MHD_create_response_from_buffer(
      reply.body.size(), const_cast<char*>(reply.body.data()), MHD_RESPMEM_MUST_COPY);
  if (response == nullptr) return MHD_NO;
  const absl::Cleanup release = [&] { MHD_destroy_response(response); };
  MHD_add_response_header(response, "Content-Type", reply.type);
  MHD_add_response_header(response, "Connection", "close");
  if (reply.code == MHD_HTTP_UNAUTHORIZED)
    MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
  return MHD_queue_response(connection, reply.code, response);
}

absl::StatusOr<std::unique_ptr<StatusServer>> StatusServer::Create(
    const Options& options, std::function<absl::StatusOr<std::string>()> status) {
  if (options.token.empty())
    return absl::InvalidArgumentError("the status server needs a token: set EVENKEEL_STATUS_TOKEN");
  EK_ASSIGN_OR_RETURN(const internal::HostPort address,
                      internal::HostPort::Parse(options.address));
  if (address.host.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the status server's address \"", options.address,
                     "\" has no host: 127.0.0.1 serves this host alone, 0.0.0.0 all networks"));
  }
  EK_ASSIGN_OR_RETURN(internal::UniqueFd listener, internal::ListenOn(address));
  EK_ASSIGN_OR_RETURN(const internal::HostPort local, internal::LocalAddress(listener));
  auto state = std::make_unique<State>();
  state->address = local.ToString();
  state->token = absl::StrCat("Bearer ", options.token);
  state->status = std::move(status);
  state->daemon = MHD_start_daemon(
      MHD_USE_EPOLL_INTERNAL_THREAD, 0, nullptr, nullptr, &State::Handle, state.get(),
      MHD_OPTION_LISTEN_SOCKET, listener.get(), MHD_OPTION_CONNECTION_LIMIT, kMaxConnections,
      MHD_OPTION_CONNECTION_TIMEOUT, kIdleSeconds, MHD_OPTION_CONNECTION_MEMORY_LIMIT, kMaxMemory,
      MHD_OPTION_END);
  if (state->daemon == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("the status server at ", state->address, " cannot start its thread"));
  }
  [[maybe_unused]] const int closed_by_daemon = listener.Release();
  return absl::WrapUnique(new StatusServer(std::move(state)));
}

StatusServer::StatusServer(std::unique_ptr<State> state) : state_(std::move(state)) {}

StatusServer::~StatusServer() { MHD_stop_daemon(state_->daemon); }

const std::string& StatusServer::address() const { return state_->address; }

}  // namespace evenkeel
