#include "evenkeel/tools/bench/rank_side.h"

#include <algorithm>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::bench {
namespace {

using testing::Each;
using testing::HasSubstr;
using testing::StartsWith;

// Every rank knows what all have, so nobody needs to send anything.
class Oracle : public Collectives {
 public:
  Oracle(int rank, int world) : rank_(rank), world_(world) {}

  std::string WhyNot(const Case& what) override {
    return what.op == Op::kReduce ? "oracles do not reduce" : "";
  }
  std::string Run(const Case& what, void*, void* out) override {
    ++runs;
    if (what.op == Op::kSendRecv) return "the line is dead";
    if (what.op == Op::kBarrier) return "";  // Lets everybody through.
    for (int64_t i = 0; i < what.out_bytes() / 4; ++i) {
      static_cast<float*>(out)[i] = static_cast<float>(Expected(what, rank_, i));
    }
    if (lies && rank_ == world_ - 1) static_cast<float*>(out)[3] = 100;
    return "";
  }

  bool lies = false;
  int runs = 0;

 private:
  const int rank_, world_;
};

class RankSideTest : public testing::Test {
 protected:
  static constexpr int kWorld = 3;
  RankSideTest() {
    for (int rank = 0; rank < kWorld; ++rank)
      oracles_.push_back(std::make_unique<Oracle>(rank, kWorld));
  }

  // All ranks' answers to the same line.
  std::vector<std::string> Answers(const std::string& line) {
    SharedBarrier barrier{};
    std::vector<std::string> answers(kWorld);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kWorld; ++rank) {
      threads.emplace_back([&, rank] {
        RankSide side({"", rank, kWorld}, *oracles_[rank], barrier);
        answers[rank] = side.Answer(line);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return answers;
  }

  std::vector<std::unique_ptr<Oracle>> oracles_;
};

TEST_F(RankSideTest, TimesEachRepetitionButNoWarmUp) {
  for (const std::string& answer : Answers("time all_reduce float32 4096 0 2 5")) {
    std::istringstream words(answer);
    std::string ok;
    words >> ok;
    EXPECT_EQ(ok, "ok");
    int count = 0;
    for (int64_t ns = 0; words >> ns; ++count) EXPECT_GT(ns, 0);
    EXPECT_EQ(count, 5);
  }
  EXPECT_EQ(oracles_[0]->runs, 7);
}

TEST_F(RankSideTest, ALoopIsOneNumber) {
  for (const std::string& answer : Answers("loop all_reduce float32 4096 0 2 5")) {
    EXPECT_EQ(std::count(answer.begin(), answer.end(), ' '), 1) << answer;
  }
  EXPECT_EQ(oracles_[0]->runs, 7);
}

TEST_F(RankSideTest, ARightResultIsOk) {
  EXPECT_THAT(Answers("check all_gather float32 1200 0"), Each("ok"));
}

TEST_F(RankSideTest, AWrongNumberIsNamed) {
  for (const auto& oracle : oracles_) oracle->lies = true;
  const std::vector<std::string> answers = Answers("check all_gather float32 1200 0");
  EXPECT_EQ(answers[0], "ok");
  EXPECT_THAT(
      answers[2],
      StartsWith("wrong all_gather of 1200 bytes, rank 2: element 3 of 300 is something else"));
}

TEST_F(RankSideTest, ABarrierThatLetsThroughIsWrong) {
  const std::vector<std::string> answers = Answers("check barrier float32 0 0");
  EXPECT_THAT(answers, testing::Contains(HasSubstr("wrong barrier of 0 bytes, rank ")));
}

TEST_F(RankSideTest, FailuresAndRefusalsAreToldApart) {
  EXPECT_THAT(Answers("time send_recv float32 8 0 0 1"), Each(HasSubstr("the line is dead")));
  EXPECT_THAT(Answers("time send_recv float32 8 0 0 1"),
              Each(StartsWith("error send_recv of 8 bytes, rank ")));
  EXPECT_THAT(Answers("check reduce float32 8 0"), Each("skip oracles do not reduce"));
  EXPECT_THAT(Answers("check all_reduce float32 8 1"),
              Each(HasSubstr("cannot allocate 8 bytes of registered memory")));
  for (const char* line :
       {"", "time", "time all_reduce", "time x float32 8 0 0 1", "time all_reduce x 8 0 0 1",
        "time all_reduce float32 8 0 0 0", "time all_reduce float32 -8 0 0 1"}) {
    EXPECT_THAT(Answers(line),
                Each(HasSubstr(absl::StrCat("received the unknown request \"", line, "\""))))
        << line;
  }
}

}  // namespace
}  // namespace evenkeel::bench
