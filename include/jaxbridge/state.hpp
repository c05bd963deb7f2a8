// SPDX-License-Identifier: Apache-2.0
// What a function keeps for each device: a plan, a handle, a cache.
#pragma once

#include <atomic>
#include <mutex>
#include <type_traits>

#include "device.hpp"

namespace jaxbridge {
inline namespace v1 {
namespace detail {

template <class T>
struct state_node {
  explicit state_node(const device& d) requires(std::is_constructible_v<T, device>)
      : on(d), value(d) {}
  explicit state_node(const device& d) requires(!std::is_constructible_v<T, device>) : on(d) {}

  device on;
  T value{};
  std::mutex mutex;
  state_node* next = nullptr;
};

// Hidden, so that two libraries with a type of one name have each their own. Never destroyed: XLA's
// threads may call during exit.
template <class T>
struct __attribute__((visibility("hidden"))) states {
  static inline std::atomic<state_node<T>*> first{nullptr};
  static inline std::mutex making;
};

template <class T>
state_node<T>* find_state(const device& on) noexcept {
  for (auto* n = states<T>::first.load(std::memory_order_acquire); n != nullptr; n = n->next) {
    if (n->on == on) return n;
  }
  return nullptr;
}

template <class T>
state_node<T>& state_on(const device& on) {
  if (auto* found = find_state<T>(on); found != nullptr) return *found;
  const std::lock_guard lock(states<T>::making);
  if (auto* found = find_state<T>(on); found != nullptr) return *found;
  auto* const made = new state_node<T>(on);
  made->next = states<T>::first.load(std::memory_order_relaxed);
  states<T>::first.store(made, std::memory_order_release);
  return *made;
}

}  // namespace detail

/// The T of a device, shared by all functions of the library that take a `state<T>`: made as
/// T(device), or T(), when it is first needed there, and outside of any capture where XLA captures.
/// It lives as long as the process. Two programs can run on one device at once: who needs the T for
/// itself takes lock().
template <class T>
class state {
 public:
  state() noexcept = default;
  explicit state(detail::state_node<T>& node) noexcept : node_(&node) {}

  [[nodiscard]] T& operator*() const noexcept { return node_->value; }
  [[nodiscard]] T* operator->() const noexcept { return &node_->value; }
  [[nodiscard]] std::unique_lock<std::mutex> lock() const { return std::unique_lock(node_->mutex); }

 private:
  detail::state_node<T>* node_ = nullptr;
};

}  // namespace v1
}  // namespace jaxbridge
