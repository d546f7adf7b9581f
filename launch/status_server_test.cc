#include "evenkeel/launch/status_server.h"

#include <poll.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/unique_fd.h"
#include "evenkeel/comm/net/socket.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::UniqueFd;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;

constexpr char kStatus[] =
    R"([{"group":"world","error":"","ranks":[{"state":"connected","doing":"runs","waited_ms":1500,)"
    R"("waits_for":[],"silent_ms":100,)"
    R"("steps":{"step":417,"step_ms":16.0,"cost":0.18,"samples":80.5}},)"
    R"({"state":"lost","doing":"","waited_ms":0,"waits_for":[]}]}])";

absl::Time Deadline() { return absl::Now() + absl::Seconds(60); }

class StatusServerTest : public testing::Test {
 protected:
  StatusServerTest()
      : server_(StatusServer::Create({.address = "127.0.0.1:0", .token = "token"},
                                     [this]() -> absl::StatusOr<std::string> {
                                       ++asked_;
                                       absl::SleepFor(takes_);
                                       if (fails_) return absl::UnavailableError("it is gone");
                                       return reply_;
                                     })
                    .value()) {}

  UniqueFd Connect() const {
    return ConnectTo(internal::HostPort::Parse(server_->address()).value(), Deadline()).value();
  }
  // Returns all that the server sends until it closes the connection.
  std::string Exchange(const std::string& request) const {
    const UniqueFd fd = Connect();
    const absl::Time deadline = Deadline();
    // A server that refuses the first bytes need not read the others.
    static_cast<void>(SendAll(fd, request, deadline));
    std::string reply;
    while (WaitFor(fd, POLLIN, deadline).ok() && !ReceiveSome(fd, reply).is_over) {
    }
    EXPECT_LT(absl::Now(), deadline) << "the connection stays open after " << reply;
    return reply;
  }
  std::string Get(const std::string& path, const std::string& authorization) const {
    return Exchange(absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: x\r\n",
                                 authorization.empty() ? "" : "Authorization: ", authorization,
                                 authorization.empty() ? "" : "\r\n", "\r\n"));
  }
  std::string Get(const std::string& path) const { return Get(path, "Bearer token"); }

  std::string reply_ = kStatus;
  std::atomic<int> asked_ = 0;
  std::atomic<bool> fails_ = false;
  absl::Duration takes_;
  std::unique_ptr<StatusServer> server_;
};

std::string BodyOf(const std::string& reply) {
  const size_t end = reply.find("\r\n\r\n");
  return end == std::string::npos ? "no headers" : reply.substr(end + 4);
}

TEST(PrometheusTextTest, KeepsNumbersAndEscapesNames) {
  EXPECT_THAT(
      PrometheusText(R"([{"group":"a\"b\n","error":"","ranks":[{"state":"connected",)"
                     R"("waited_ms":0,"steps":{"step":123456789,"waited_ms":2500}}]}])")
          .value(),
      AllOf(HasSubstr("evenkeel_rank_steps{group=\"a\\\"b\\n\",rank=\"0\"} 123456789\n"),
            HasSubstr("evenkeel_rank_waiting_seconds{group=\"a\\\"b\\n\",rank=\"0\"} 2.5\n")));
}

TEST_F(StatusServerTest, ServesJsonAndMetrics) {
  const std::string json = Get("/status.json");
  EXPECT_THAT(json, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(json, HasSubstr("Content-Type: application/json\r\n"));
  EXPECT_EQ(BodyOf(json), kStatus);
  const std::string metrics = BodyOf(Get("/metrics"));
  EXPECT_THAT(metrics, HasSubstr("# TYPE evenkeel_rank_steps gauge\n"
                                 "evenkeel_rank_steps{group=\"world\",rank=\"0\"} 417\n"));
  EXPECT_THAT(metrics,
              HasSubstr("evenkeel_rank_waiting_seconds{group=\"world\",rank=\"0\"} 1.5\n"));
  EXPECT_THAT(metrics, HasSubstr("evenkeel_rank_samples{group=\"world\",rank=\"0\"} 80.5\n"));
  EXPECT_THAT(metrics, HasSubstr("evenkeel_rank_connected{group=\"world\",rank=\"1\"} 0\n"));
  EXPECT_THAT(metrics, HasSubstr("evenkeel_group_failed{group=\"world\"} 0\n"));
  EXPECT_THAT(Get("/other"), StartsWith("HTTP/1.1 404 "));
}

TEST_F(StatusServerTest, ServesHeadersAlone) {
  const std::string reply =
      Exchange("HEAD /status.json HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token\r\n\r\n");
  EXPECT_THAT(reply, StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(reply, HasSubstr(absl::StrCat("Content-Length: ", reply_.size(), "\r\n")));
  EXPECT_THAT(BodyOf(reply), IsEmpty());
}

TEST_F(StatusServerTest, RefusesRequestsWithoutTheToken) {
  for (const char* authorization :
       {"", "Bearer ", "Bearer toke", "Bearer token2", "Bearer Token", "Basic token", "token"}) {
    for (const char* path : {"/status.json", "/metrics", "/", "/other"}) {
      const std::string reply = Get(path, authorization);
      EXPECT_THAT(reply, StartsWith("HTTP/1.1 401 ")) << authorization << path;
      EXPECT_THAT(BodyOf(reply), IsEmpty()) << authorization << path;
    }
  }
  EXPECT_EQ(asked_, 0);
}

TEST_F(StatusServerTest, ReportsWhyTheStateIsMissing) {
  fails_ = true;
  takes_ = absl::Seconds(3);  // As long as a host that hangs.
  const std::string reply = Get("/metrics");
  EXPECT_THAT(reply, StartsWith("HTTP/1.1 503 "));
  EXPECT_EQ(BodyOf(reply), "it is gone\n");
}

TEST_F(StatusServerTest, ReportsAStateThatIsNotAsExpected) {
  for (const char* state :
       {"", "no JSON", "{\"a\":1}", "[1]", R"([{"group":1,"error":""}])",
        R"([{"group":"w","error":"","ranks":[{"state":[],"waited_ms":{}}]}])"}) {
    reply_ = state;
    const std::string reply = Get("/metrics");
    EXPECT_THAT(reply, StartsWith("HTTP/1.1 500 ")) << state;
    EXPECT_THAT(BodyOf(reply), StartsWith("the state of the job is not as expected: ")) << state;
  }
}

TEST_F(StatusServerTest, RejectsMalformedRequests) {
  for (const std::string& request :
       {absl::StrCat("GET /", std::string(100'000, 'a'), " HTTP/1.1\r\n\r\n"),
        absl::StrCat("GET / HTTP/1.1\r\nA: ", std::string(100'000, 'a'), "\r\n\r\n"),
        std::string("POST /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token\r\n"
                    "Content-Length: 1000000000\r\n\r\n")}) {
    const std::string reply = Exchange(request);
    EXPECT_THAT(reply, StartsWith("HTTP/1.1 4")) << request.substr(0, 20);
  }
  for (const std::string& bytes :
       {std::string("hello\r\n\r\n"), std::string("\xff\0\r\n\r\n\r\n", 8)})
    EXPECT_THAT(Exchange(bytes), Not(StartsWith("HTTP/1.1 2"))) << bytes;
  const std::string reply =
      Exchange("DELETE /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token\r\n\r\n");
  EXPECT_THAT(reply, StartsWith("HTTP/1.1 405 "));
  EXPECT_THAT(reply, HasSubstr("Allow: GET, HEAD\r\n"));
  EXPECT_EQ(asked_, 0);
  EXPECT_EQ(BodyOf(Get("/status.json")), kStatus);
}

// They send nothing or half a request, or do not read the reply. Those beyond the limit wait until
// others have been idle for too long.
TEST_F(StatusServerTest, SlowConnectionsEndAndOthersGoOn) {
  reply_ = std::string(16 << 20, ' ');  // More than fits into the buffers of a connection.
  std::vector<UniqueFd> slow;
  for (int i = 0; i < 200; ++i) {
    slow.push_back(Connect());
    const absl::string_view bytes =
        i < 5 ? "GET /status.json HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token\r\n\r\n"
              : "GET /sta";
    if (i % 2 == 0) {
      EXPECT_TRUE(SendAll(slow.back(), bytes, Deadline()).ok());
    }
  }
  for (int i = 0; i < 3; ++i) EXPECT_EQ(BodyOf(Get("/status.json")).size(), reply_.size());
  const absl::Time begin = absl::Now();
  server_.reset();  // While they are open.
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
}

TEST_F(StatusServerTest, RequestsThatNeverEndKeepNobodyOut) {
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 300; ++i) strangers.push_back(Connect());
  std::atomic<bool> stop = false;
  std::thread sender([&] {
    while (!stop) {
      for (const UniqueFd& stranger : strangers) (void)SendSome(stranger, "G");
      absl::SleepFor(absl::Milliseconds(200));
    }
  });
  for (int i = 0; i < 3; ++i) EXPECT_EQ(BodyOf(Get("/status.json")), kStatus);
  stop = true;
  sender.join();
}

// Each of them is closed after a while, also one that sends nothing.
TEST_F(StatusServerTest, ClosesIdleConnections) {
  const UniqueFd idle = Connect();
  std::string reply;
  while (true) {
    ASSERT_TRUE(WaitFor(idle, POLLIN, Deadline()).ok());
    if (ReceiveSome(idle, reply).is_over) break;
  }
}

TEST(StatusServerErrorsTest, RefusesAddressesAndTokensThatItCannotUse) {
  const auto status = [](const char* address, const char* token) {
    return StatusServer::Create({.address = address, .token = token}, [] { return ""; }).status();
  };
  EXPECT_EQ(status("9400", "token").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status(":9400", "token").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status("127.0.0.1:94000", "token").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status("127.0.0.1:0", "").message()), HasSubstr("EVENKEEL_STATUS_TOKEN"));
  EXPECT_EQ(status("203.0.113.1:9400", "token").code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace evenkeel
