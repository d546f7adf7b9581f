// The two macros that carry absl::Status through evenkeel (the packaged Abseil has none).
//
//   EK_RETURN_IF_ERROR(channel.Barrier().Wait());
//   EK_ASSIGN_OR_RETURN(Plan plan, PlanBuckets(params, options));
//
// `EK_RETURN_IF_ERROR(expression)` returns the status of a failed expression from the enclosing
// function; `EK_ASSIGN_OR_RETURN(declaration, expression)` moves out the value, or returns the
// status.

#ifndef EVENKEEL_COMM_STATUS_H_
#define EVENKEEL_COMM_STATUS_H_

#include <utility>

#include "absl/base/optimization.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

// Names of their own, so that neither hides another one on its line or around it (-Wshadow).
#define EK_RETURN_IF_ERROR(expression) \
  EK_RETURN_IF_ERROR_IMPL_(EK_STATUS_CONCAT_(ek_status_, __COUNTER__), expression)

#define EK_RETURN_IF_ERROR_IMPL_(name, expression)                          \
  do {                                                                      \
    if (absl::Status name = (expression); ABSL_PREDICT_FALSE(!name.ok())) { \
      return name;                                                          \
    }                                                                       \
  } while (false)

#define EK_ASSIGN_OR_RETURN(declaration, expression) \
  EK_ASSIGN_OR_RETURN_IMPL_(EK_STATUS_CONCAT_(ek_status_or_, __COUNTER__), declaration, expression)

#define EK_ASSIGN_OR_RETURN_IMPL_(name, declaration, expression)       \
  auto name = (expression);                                            \
  if (ABSL_PREDICT_FALSE(!name.ok())) return std::move(name).status(); \
  declaration = *std::move(name)

#define EK_STATUS_CONCAT_(a, b) EK_STATUS_CONCAT_IMPL_(a, b)
#define EK_STATUS_CONCAT_IMPL_(a, b) a##b

namespace evenkeel {

// Returns `status` with another message. The code and the payloads (FailureInfo) stay; so does OK.
inline absl::Status WithMessage(const absl::Status& status, absl::string_view message) {
  absl::Status changed(status.code(), message);
  status.ForEachPayload([&changed](absl::string_view type, const absl::Cord& payload) {
    changed.SetPayload(type, payload);
  });
  return changed;
}

// Returns `status` with "<where>: " before its message; OK stays OK.
inline absl::Status Annotate(const absl::Status& status, absl::string_view where) {
  if (status.ok()) return status;
  return WithMessage(status, absl::StrCat(where, ": ", status.message()));
}

template <typename T>
absl::StatusOr<T> Annotate(absl::StatusOr<T> value, absl::string_view where) {
  if (value.ok()) return value;
  return Annotate(value.status(), where);
}

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_STATUS_H_
