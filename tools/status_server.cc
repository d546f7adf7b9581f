#include "evenkeel/tools/status_server.h"

#include <atomic>
#include <ctime>
#include <thread>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "httplib.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

// A connection has a thread while it is open: for one request, or for this time without one. Many
// idle connections delay a request by seconds, and the job by nothing.
constexpr int kThreads = 64;
constexpr time_t kIdleSeconds = 1;
// A GET has no body.
constexpr size_t kMaxBody = 1024;

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
  std::string address, token;
  std::function<absl::StatusOr<std::string>()> status;
  httplib::Server server;
  std::atomic<bool> has_ended = false;
  std::thread thread;

  void Reply(httplib::Response& response, bool is_json) {
    const absl::StatusOr<std::string> json = status();
    if (!json.ok()) {
      response.status = 503;
      return response.set_content(absl::StrCat(json.status().message(), "\n"), "text/plain");
    }
    if (is_json) return response.set_content(*json, "application/json");
    response.set_content(PrometheusText(Json::parse(*json)), "text/plain; version=0.0.4");
  }
};

absl::StatusOr<std::unique_ptr<StatusServer>> StatusServer::Create(
    const Options& options, std::function<absl::StatusOr<std::string>()> status) {
  const size_t colon = options.address.rfind(':');
  int port = 0;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(options.address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("the address of the status server is \"", options.address,
                     "\", expected host:port, such as 127.0.0.1:9400"));
  }
  if (options.token.empty())
    return absl::InvalidArgumentError("the status server needs a token: set EVENKEEL_STATUS_TOKEN");
  auto state = std::make_unique<State>();
  state->token = absl::StrCat("Bearer ", options.token);
  state->status = std::move(status);
  httplib::Server& server = state->server;
  server.new_task_queue = [] { return new httplib::ThreadPool(kThreads); };
  server.set_read_timeout(kIdleSeconds);
  server.set_write_timeout(kIdleSeconds);
  server.set_keep_alive_timeout(kIdleSeconds);  // For the first byte, too.
  server.set_keep_alive_max_count(1);
  server.set_payload_max_length(kMaxBody);
  server.set_pre_routing_handler(
      [&token = state->token](const httplib::Request& request, httplib::Response& response) {
        if (AreEqual(request.get_header_value("Authorization"), token))
          return httplib::Server::HandlerResponse::Unhandled;
        response.status = 401;
        response.set_header("WWW-Authenticate", "Bearer");
        return httplib::Server::HandlerResponse::Handled;
      });
  for (const bool is_json : {true, false}) {
    server.Get(is_json ? "/status.json" : "/metrics",
               [&state = *state, is_json](const httplib::Request&, httplib::Response& response) {
                 state.Reply(response, is_json);
               });
  }
  const std::string host = options.address.substr(0, colon);
  const bool is_bound =
      port == 0 ? (port = server.bind_to_any_port(host)) > 0 : server.bind_to_port(host, port);
  if (!is_bound) {
    return absl::UnavailableError(absl::StrCat("the status server cannot listen on ",
                                               options.address,
                                               ": is the address one of this host, "
                                               "and the port free?"));
  }
  state->address = absl::StrCat(host, ":", port);
  state->thread = std::thread([&state = *state] {
    state.server.listen_after_bind();
    state.has_ended = true;
  });
  return absl::WrapUnique(new StatusServer(std::move(state)));
}

StatusServer::StatusServer(std::unique_ptr<State> state) : state_(std::move(state)) {}

StatusServer::~StatusServer() {
  // A server that has not begun to listen does not hear stop().
  while (!state_->server.is_running() && !state_->has_ended) std::this_thread::yield();
  state_->server.stop();
  state_->thread.join();
}

const std::string& StatusServer::address() const { return state_->address; }

}  // namespace evenkeel
