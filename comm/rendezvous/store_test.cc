// The common behaviour of all stores, whatever they are made of.

#include "evenkeel/comm/rendezvous/store.h"

#include <stdlib.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/rendezvous/file_store.h"
#include "evenkeel/comm/rendezvous/tcp_store.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

// Several clients of one store.
class Clients {
 public:
  virtual ~Clients() = default;
  virtual std::unique_ptr<Store> Connect() = 0;
};

class FileClients : public Clients {
 public:
  FileClients() {
    std::string pattern = testing::TempDir() + "/storeXXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  std::unique_ptr<Store> Connect() override { return FileStore::Open(folder_).value(); }

 private:
  std::string folder_;
};

class TcpClients : public Clients {
 public:
  std::unique_ptr<Store> Connect() override {
    return TcpStore::Connect({.addresses = {server_->address()}, .secret = "a secret"}).value();
  }

 private:
  std::unique_ptr<TcpStoreServer> server_ = TcpStoreServer::Create({.secret = "a secret"}).value();
};

struct Implementation {
  const char* name;
  std::function<std::unique_ptr<Clients>()> make;
};

class StoreTest : public testing::TestWithParam<Implementation> {
 protected:
  const std::unique_ptr<Clients> clients_ = GetParam().make();
};

TEST_P(StoreTest, KeepsAnyBytesUnderAnyKey) {
  const std::unique_ptr<Store> a = clients_->Connect(), b = clients_->Connect();
  const std::string everything("\0\1\n\xff../x%", 9);
  for (const std::string& key :
       {std::string("plain"), std::string("../../up"), std::string("a/b c\n"), everything}) {
    ASSERT_TRUE(a->Set(key, absl::StrCat(everything, key)).ok());
  }
  ASSERT_TRUE(a->Set("plain", "replaced").ok());
  EXPECT_EQ(b->Get("../../up", absl::Seconds(5)).value(), everything + "../../up");
  EXPECT_EQ(b->Get("a/b c\n", absl::Seconds(5)).value(), everything + "a/b c\n");
  EXPECT_EQ(b->Get(everything, absl::Seconds(5)).value(), everything + everything);
  EXPECT_EQ(b->Get("plain", absl::Seconds(5)).value(), "replaced");
  ASSERT_TRUE(a->Set("empty", "").ok());
  EXPECT_EQ(b->Get("empty", absl::Seconds(5)).value(), "");
  const std::string large(3 << 20, 'x');
  ASSERT_TRUE(a->Set("large", large).ok());
  EXPECT_EQ(b->Get("large", absl::Seconds(30)).value(), large);
}

TEST_P(StoreTest, GetWaitsForAnotherClient) {
  const std::unique_ptr<Store> a = clients_->Connect(), b = clients_->Connect();
  std::thread setter([&] {
    EXPECT_EQ(a->Get("question", absl::Seconds(30)).value(), "?");
    EXPECT_TRUE(a->Set("answer", "42").ok());
  });
  EXPECT_TRUE(b->Set("question", "?").ok());
  EXPECT_EQ(b->Get("answer", absl::Seconds(30)).value(), "42");
  setter.join();
}

TEST_P(StoreTest, OneClientServesManyThreads) {
  const std::unique_ptr<Store> store = clients_->Connect();
  std::thread waiter([&] { EXPECT_EQ(store->Get("late", absl::Seconds(30)).value(), "here"); });
  EXPECT_TRUE(store->Set("late", "here").ok());
  waiter.join();
}

TEST_P(StoreTest, GetNamesTheKeyThatDoesNotCome) {
  const absl::Time start = SteadyNow();
  const absl::Status status = clients_->Connect()->Get("missing", absl::Milliseconds(20)).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("missing"));
  EXPECT_GE(SteadyNow() - start, absl::Milliseconds(20));
}

TEST_P(StoreTest, AnAnswerAfterTheDeadlineDisturbsNothing) {
  const std::unique_ptr<Store> a = clients_->Connect(), b = clients_->Connect();
  EXPECT_FALSE(a->Get("late", absl::Milliseconds(1)).ok());
  EXPECT_TRUE(b->Set("late", "1").ok());
  EXPECT_TRUE(b->Set("other", "2").ok());
  EXPECT_EQ(a->Get("other", absl::Seconds(5)).value(), "2");
}

TEST_P(StoreTest, EveryAdditionCounts) {
  constexpr int kThreads = 4, kAdditions = 25;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      const std::unique_ptr<Store> store = clients_->Connect();
      for (int i = 0; i < kAdditions; ++i) EXPECT_TRUE(store->Add("sum", 3).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::unique_ptr<Store> store = clients_->Connect();
  EXPECT_EQ(store->Add("sum", -1).value(), kThreads * kAdditions * 3 - 1);
  EXPECT_EQ(store->Get("sum", absl::Seconds(5)).value(),
            absl::StrCat(kThreads * kAdditions * 3 - 1));
}

TEST_P(StoreTest, AddRefusesWhatIsNoNumber) {
  const std::unique_ptr<Store> store = clients_->Connect();
  ASSERT_TRUE(store->Set("word", "seven").ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(store->Add("word", 1).status()));
  ASSERT_TRUE(store->Set("most", "9223372036854775807").ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(store->Add("most", 1).status()));
  EXPECT_EQ(store->Get("most", absl::Seconds(5)).value(), "9223372036854775807");
}

TEST_P(StoreTest, GetOrSetGivesAllTheSameValue) {
  constexpr int kThreads = 4;
  std::vector<std::string> got(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      got[t] = clients_->Connect()->GetOrSet("secret", absl::StrCat("mine", t)).value();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& value : got) EXPECT_EQ(value, got[0]);
  EXPECT_EQ(clients_->Connect()->Get("secret", absl::Seconds(5)).value(), got[0]);
}

TEST_P(StoreTest, ChecksAndDeletes) {
  const std::unique_ptr<Store> store = clients_->Connect();
  EXPECT_FALSE(store->Check("key").value());
  EXPECT_FALSE(store->Delete("key").value());
  ASSERT_TRUE(store->Set("key", "value").ok());
  EXPECT_TRUE(store->Check("key").value());
  EXPECT_TRUE(store->Delete("key").value());
  EXPECT_FALSE(store->Check("key").value());
}

TEST_P(StoreTest, RefusesKeysThatAreNone) {
  const std::unique_ptr<Store> store = clients_->Connect();
  EXPECT_TRUE(absl::IsInvalidArgument(store->Set("", "value")));
  EXPECT_TRUE(absl::IsInvalidArgument(store->Set(std::string(5000, 'k'), "value")));
  EXPECT_TRUE(absl::IsInvalidArgument(store->Get("", absl::Seconds(5)).status()));
}

INSTANTIATE_TEST_SUITE_P(
    , StoreTest,
    testing::Values(Implementation{"File", [] { return std::make_unique<FileClients>(); }},
                    Implementation{"Tcp", [] { return std::make_unique<TcpClients>(); }}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace evenkeel
