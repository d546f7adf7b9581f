#include "evenkeel/tools/status_server.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "httplib.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr char kStatus[] =
    R"([{"group":"world","error":"","ranks":[{"state":"connected","doing":"runs","waited_ms":1500,)"
    R"("waits_for":[],"silent_ms":100,"steps":{"step":417,"step_ms":16.0,"cost":0.18}},)"
    R"({"state":"lost","doing":"","waited_ms":0,"waits_for":[]}]}])";

class StatusServerTest : public testing::Test {
 protected:
  StatusServerTest()
      : server_(StatusServer::Create({.address = "127.0.0.1:0", .token = "token"},
                                     [this]() -> absl::StatusOr<std::string> {
                                       ++asked_;
                                       if (fails_) return absl::UnavailableError("it is gone");
                                       return kStatus;
                                     })
                    .value()),
        client_("http://" + server_->address()) {
    client_.set_bearer_token_auth("token");
  }

  std::atomic<int> asked_ = 0;
  std::atomic<bool> fails_ = false;
  const std::unique_ptr<StatusServer> server_;
  httplib::Client client_;
};

TEST_F(StatusServerTest, ServesJsonAndMetrics) {
  const httplib::Result json = client_.Get("/status.json");
  ASSERT_TRUE(json);
  EXPECT_EQ(json->status, 200);
  EXPECT_EQ(json->body, kStatus);
  const httplib::Result metrics = client_.Get("/metrics");
  ASSERT_TRUE(metrics);
  EXPECT_THAT(metrics->body, HasSubstr("# TYPE evenkeel_rank_steps gauge\n"
                                       "evenkeel_rank_steps{group=\"world\",rank=\"0\"} 417\n"));
  EXPECT_THAT(metrics->body,
              HasSubstr("evenkeel_rank_waiting_seconds{group=\"world\",rank=\"0\"} 1.5\n"));
  EXPECT_THAT(metrics->body, HasSubstr("evenkeel_rank_connected{group=\"world\",rank=\"1\"} 0\n"));
  EXPECT_THAT(metrics->body, HasSubstr("evenkeel_group_failed{group=\"world\"} 0\n"));
}

TEST_F(StatusServerTest, SaysNothingWithoutTheToken) {
  for (const char* token : {"", "toke", "token2", "Token"}) {
    httplib::Client stranger("http://" + server_->address());
    if (*token != '\0') stranger.set_bearer_token_auth(token);
    for (const char* path : {"/status.json", "/metrics", "/", "/other"}) {
      const httplib::Result reply = stranger.Get(path);
      ASSERT_TRUE(reply);
      EXPECT_EQ(reply->status, 401) << token << path;
      EXPECT_EQ(reply->body, "");
    }
  }
  EXPECT_EQ(asked_, 0);
}

TEST_F(StatusServerTest, PassesOnWhyThereIsNoState) {
  fails_ = true;
  const httplib::Result reply = client_.Get("/metrics");
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->status, 503);
  EXPECT_EQ(reply->body, "it is gone\n");
}

TEST_F(StatusServerTest, OutlivesGarbageAndManyConnections) {
  const int port = std::stoi(server_->address().substr(server_->address().find(':') + 1));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::vector<int> idle;  // They connect, and say nothing or half a request.
  for (int i = 0; i < 200; ++i) {
    idle.push_back(socket(AF_INET, SOCK_STREAM, 0));
    ASSERT_EQ(connect(idle.back(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    if (i % 2 == 0) {
      EXPECT_EQ(send(idle.back(), "GET /sta", 8, MSG_NOSIGNAL), 8);
    }
    if (i % 7 == 0) {
      EXPECT_EQ(send(idle.back(), "\xff\0\r\n\r\n\r", 7, MSG_NOSIGNAL), 7);
    }
  }
  client_.set_read_timeout(60);
  const httplib::Result reply = client_.Get("/status.json");
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->body, kStatus);
  EXPECT_EQ(asked_, 1);
  for (const int fd : idle) close(fd);
  EXPECT_EQ(client_.Get(std::string(100'000, 'a'))->status, 414);
  EXPECT_EQ(client_.Get("/status.json")->body, kStatus);
}

TEST(StatusServerErrorsTest, RefusesWhatItCannotServe) {
  const auto status = [](const char* address, const char* token) {
    return StatusServer::Create({.address = address, .token = token}, [] { return ""; }).status();
  };
  EXPECT_EQ(status("9400", "token").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status("127.0.0.1:94000", "token").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status("127.0.0.1:0", "").message()), HasSubstr("EVENKEEL_STATUS_TOKEN"));
  EXPECT_EQ(status("203.0.113.1:9400", "token").code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace evenkeel
