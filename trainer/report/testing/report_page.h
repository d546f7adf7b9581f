// The data of a report's page, for tests.
//
//   const nlohmann::json data = DataOf(html);
//   EXPECT_EQ(data["title"], "mlp on 2 ranks");

#ifndef EVENKEEL_TRAINER_REPORT_TESTING_REPORT_PAGE_H_
#define EVENKEEL_TRAINER_REPORT_TESTING_REPORT_PAGE_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace evenkeel {

// Returns the data of a whole page; a test failure and null if `html` is no such page: another
// template, data that does not parse, or data that could end its element.
nlohmann::json DataOf(absl::string_view html);

// Returns the events of a run's page, such as "lost: rank 2".
std::vector<std::string> EventsOf(const nlohmann::json& data);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_TESTING_REPORT_PAGE_H_
