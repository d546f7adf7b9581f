// A table for people: a line of titles, and a line for each row.
//
//   const Table table({{"size", 9}, {"backend", -10}, {"median us", 12}});
//   std::cout << table.Titles();
//   std::cout << table.Line({"4 MiB", "shm", "285.31"});
//
// Units:   a width is in characters; a negative one aligns to the left. Longer cells are not cut.
// Threads: immutable.

#ifndef EVENKEEL_TOOLS_MEASURE_TABLE_H_
#define EVENKEEL_TOOLS_MEASURE_TABLE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace evenkeel {

class Table {
 public:
  struct Column {
    std::string title;
    int width = 0;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  std::string Titles() const;
  // `cells` has at most one cell per column; the missing last ones are empty.
  std::string Line(const std::vector<std::string>& cells) const;

 private:
  std::vector<Column> columns_;
};

// 1 KiB, 4 MiB, 1020 B.
std::string SizeText(int64_t bytes);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_MEASURE_TABLE_H_
