// SPDX-License-Identifier: Apache-2.0
// Success or one error (code and text), and a value or one error.
#pragma once

#include <cstdint>
#include <new>
#include <string>
#include <utility>
#include <variant>

namespace jaxbridge {
inline namespace v1 {

/// Error codes. The values are those of XLA's FFI (and of absl::StatusCode).
enum class status_code : std::uint8_t {
  ok = 0,
  cancelled = 1,
  unknown = 2,
  invalid_argument = 3,
  deadline_exceeded = 4,
  not_found = 5,
  already_exists = 6,
  permission_denied = 7,
  resource_exhausted = 8,
  failed_precondition = 9,
  aborted = 10,
  out_of_range = 11,
  unimplemented = 12,
  internal = 13,
  unavailable = 14,
  data_loss = 15,
  unauthenticated = 16,
};

/// Success, or an error with a code and a text. Success owns no memory.
class [[nodiscard]] status {
 public:
  status() noexcept = default;

  /// An error. `code` must not be `ok`; `ok` is turned into `unknown`, so that an error that was
  /// reported can never be taken for success.
  status(status_code code, std::string message) noexcept
      : code_(code == status_code::ok ? status_code::unknown : code),
        message_(std::move(message)) {}

  [[nodiscard]] bool ok() const noexcept { return code_ == status_code::ok; }
  [[nodiscard]] status_code code() const noexcept { return code_; }
  [[nodiscard]] const std::string& message() const noexcept { return message_; }

 private:
  status_code code_ = status_code::ok;
  std::string message_;
};

/// A value, or the error that stood in its way.
template <class T>
class [[nodiscard]] result {
 public:
  result(T value) noexcept : state_(std::in_place_index<0>, std::move(value)) {}  // NOLINT
  result(jaxbridge::status error) noexcept                                        // NOLINT
      : state_(std::in_place_index<1>, std::move(error)) {}

  [[nodiscard]] bool ok() const noexcept { return state_.index() == 0; }
  /// The value; only where `ok()`.
  [[nodiscard]] T& value() & noexcept { return *std::get_if<0>(&state_); }
  [[nodiscard]] const T& value() const& noexcept { return *std::get_if<0>(&state_); }
  [[nodiscard]] T&& value() && noexcept { return std::move(*std::get_if<0>(&state_)); }
  /// The error; only where not `ok()`.
  [[nodiscard]] const jaxbridge::status& error() const noexcept { return *std::get_if<1>(&state_); }

 private:
  std::variant<T, jaxbridge::status> state_;
};

}  // namespace v1
}  // namespace jaxbridge
