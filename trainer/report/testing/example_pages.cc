// Writes pages for tests/report_page.sh into a folder:
//
//   example_pages FOLDER

#include <cstdio>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "evenkeel/trainer/report/html_report.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/trainer/report/testing/example_record.h"

namespace evenkeel {
namespace {

// Continued at step 150 from a checkpoint without a history of steps. The clock once stepped back.
RunRecord ResumedRecord() {
  RunRecord record = ExampleRecord(3);
  record.steps.erase(record.steps.begin(), record.steps.begin() + 150);
  record.events.push_back({.step = 150, .kind = "resumed", .text = "with 3 ranks"});
  record.ranks[1].traces[0].spans[2].end_ns -= 2'000'000;
  record.waits.ranks.resize(3);
  for (int rank = 0; rank < 3; ++rank) {
    StragglerReport::Rank& one = record.waits.ranks[rank];
    one.rank = rank;
    one.cost = 0.25;
    one.without_input = 0.125 * rank;
    one.mean.waited_us = 3000;
    one.mean.ready = {.first_us = 750, .last_us = 6500};
  }
  return record;
}

RunRecord DivergedRecord() {
  RunRecord record = ExampleRecord(1);
  record.bytes_per_prediction = 4;
  record.ending = "the loss is not finite";
  record.epochs.back().test_loss = std::numeric_limits<double>::infinity();
  record.epochs.back().train_loss = kUnknown;
  return record;
}

nlohmann::json Forecast() {
  using Json = nlohmann::json;
  const Json curve = {{"name", "predicted"}, {"style", "rate"}, {"x", {1, 64}}, {"y", {2, 3}}};
  const Json chart = {
      {"title", "Duration"}, {"xName", "ranks"}, {"xLog2", true}, {"curves", Json::array({curve})}};
  return {{"title", "Predicted steps"}, {"charts", Json::array({chart})}, {"text", "64 ranks"}};
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  using namespace evenkeel;
  if (argc != 2) {
    std::fprintf(stderr, "usage: example_pages FOLDER\n");
    return 2;
  }
  const auto write = [&](const std::string& name, const std::string& page) {
    return bool(std::ofstream(std::string(argv[1]) + "/" + name + ".html") << page << std::flush);
  };
  const bool ok = write("resumed", RenderReport(ResumedRecord())) &&
                  write("lost", RenderReport(RecordOfLostRank())) &&
                  write("diverged", RenderReport(DivergedRecord())) &&
                  write("empty", RenderReport({})) && write("forecast", RenderPage(Forecast()));
  return ok ? 0 : 1;
}
