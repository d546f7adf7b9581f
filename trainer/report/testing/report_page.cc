#include "evenkeel/trainer/report/testing/report_page.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "evenkeel/trainer/report/html_report.h"

namespace evenkeel {

nlohmann::json DataOf(absl::string_view html) {
  const std::string other = RenderPage("the data");
  const std::pair<std::string, std::string> around = absl::StrSplit(other, "\"the data\"");
  if (!absl::ConsumePrefix(&html, around.first) || !absl::ConsumeSuffix(&html, around.second)) {
    ADD_FAILURE() << "this is not a report's page: " << html.substr(0, 200);
    return nullptr;
  }
  EXPECT_EQ(html.find('<'), absl::string_view::npos);
  nlohmann::json data = nlohmann::json::parse(html, nullptr, /*allow_exceptions=*/false);
  if (!data.is_discarded()) return data;
  ADD_FAILURE() << "the page's data is no JSON: " << html.substr(0, 200);
  return nullptr;
}

std::vector<std::string> EventsOf(const nlohmann::json& data) {
  std::vector<std::string> events;
  for (const nlohmann::json& event : data["events"]["shown"])
    events.push_back(event["kind"].get<std::string>() + ": " + event["text"].get<std::string>());
  return events;
}

}  // namespace evenkeel
