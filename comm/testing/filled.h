// Structs that list their fields (comm/base/fields.h), with a value in each field that is not the
// default: lists have two items, numbers and strings differ.
//
//   for (const ToHub& message : OneOfEach<ToHub>()) ...  // of each type of the variant
//
// A struct that does not list one of its fields fails the test: such a field would not be sent.
//
// Threads: pure functions.

#ifndef EVENKEEL_COMM_TESTING_FILLED_H_
#define EVENKEEL_COMM_TESTING_FILLED_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/fields.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {

// Converts to the type of any field; only for expressions that are not evaluated.
struct AnyField {
  template <typename T>
  operator T() const;
};

// Returns the number of fields of an aggregate without base classes: that of the values with which
// it can be initialized.
template <typename T, typename... Fields>
constexpr size_t FieldCount() {
  if constexpr (requires { T{Fields{}..., AnyField{}}; }) {
    return FieldCount<T, Fields..., AnyField>();
  } else {
    return sizeof...(Fields);
  }
}

struct ListedFieldCounter : FieldVisitor {
  size_t count = 0;

  void operator()(const auto&... fields) { count += sizeof...(fields); }
};

class FieldFiller : public FieldVisitor {
 public:
  template <typename... Fields>
  void operator()(Fields&&... fields) {
    (Fill(fields), ...);
  }

 private:
  void Fill(bool& value) { value = true; }
  void Fill(int32_t& value) { value = ++number_; }
  void Fill(int64_t& value) { value = (int64_t{1} << 40) + ++number_; }
  void Fill(uint64_t& value) { value = (uint64_t{1} << 63) + ++number_; }
  void Fill(double& value) { value = 0.5 + ++number_; }
  void Fill(std::string& value) { value = absl::StrCat("text", std::string(1, '\0'), ++number_); }
  void Fill(absl::Status& value) { value = absl::UnavailableError(absl::StrCat(++number_)); }
  template <typename Enum>
  void Fill(BoundedEnum<Enum>& field) {
    field.value = field.last;
  }
  template <FieldList List>
  void Fill(List& list) {
    for (int i = 0; i < 2; ++i) Fill(list.emplace_back());
  }
  template <typename T>
  void Fill(T& value) {
    if constexpr (!std::is_empty_v<T>) {
      ListedFieldCounter listed;
      T::VisitFields(value, listed);
      EXPECT_EQ(listed.count, FieldCount<T>()) << typeid(T).name();
      T::VisitFields(value, *this);
    }
  }

  int number_ = 0;
};

template <typename Variant>
std::vector<Variant> OneOfEach() {
  std::vector<Variant> all;
  [&]<size_t... I>(std::index_sequence<I...>) { (all.emplace_back(std::in_place_index<I>), ...); }
  (std::make_index_sequence<std::variant_size_v<Variant>>());
  FieldFiller fill;
  for (Variant& each : all) std::visit(fill, each);
  return all;
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TESTING_FILLED_H_
