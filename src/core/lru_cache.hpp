// SPDX-License-Identifier: Apache-2.0
// A bounded map from lists of addresses to values; the least recently used goes first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace jaxbridge {

/// Keys are compared exactly, never by their hash alone. Not synchronized.
template <class Value>
class lru_cache {
 public:
  using key_view = std::span<const std::uintptr_t>;

  explicit lru_cache(std::size_t limit) noexcept : limit_(limit) {}

  /// The value of `key`, which is now the most recently used; null where there is none.
  [[nodiscard]] Value* find(key_view key) noexcept {
    // Loops come with the same list again and again.
    if (!entries_.empty() && equal(entries_.front().first, key)) return &entries_.front().second;
    const auto found = index_.find(key);
    if (found == index_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, found->second);
    return &entries_.front().second;
  }

  /// Adds a key that is not there yet. Returns what had to go for it: destroying that may run
  /// anything, also this cache.
  [[nodiscard]] std::list<std::pair<std::vector<std::uintptr_t>, Value>> insert(key_view key,
                                                                                Value value) {
    std::list<std::pair<std::vector<std::uintptr_t>, Value>> gone;
    if (limit_ == 0) return gone;
    entries_.emplace_front(std::vector<std::uintptr_t>(key.begin(), key.end()), std::move(value));
    index_.emplace(key_view(entries_.front().first), entries_.begin());
    while (entries_.size() > limit_) {
      index_.erase(key_view(entries_.back().first));
      gone.splice(gone.end(), entries_, std::prev(entries_.end()));
    }
    return gone;
  }

  /// Takes a key out, and returns its entry.
  std::list<std::pair<std::vector<std::uintptr_t>, Value>> erase(key_view key) {
    std::list<std::pair<std::vector<std::uintptr_t>, Value>> gone;
    const auto found = index_.find(key);
    if (found == index_.end()) return gone;
    const auto entry = found->second;
    index_.erase(found);
    gone.splice(gone.end(), entries_, entry);
    return gone;
  }

  /// The value that was used longest ago. There is one.
  [[nodiscard]] const Value& oldest() const noexcept { return entries_.back().second; }

  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] std::size_t limit() const noexcept { return limit_; }

 private:
  using entry_list = std::list<std::pair<std::vector<std::uintptr_t>, Value>>;

  static bool equal(key_view a, key_view b) noexcept {
    if (a.size() != b.size()) return false;
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (a[i] != b[i]) return false;
    }
    return true;
  }

  struct hash {
    std::size_t operator()(key_view key) const noexcept {
      std::uint64_t h = 0x9E3779B97F4A7C15u;
      for (const std::uintptr_t word : key) {
        // Addresses differ in their middle bits.
        h = (h ^ word) * 0xBF58476D1CE4E5B9u;
        h ^= h >> 32;
      }
      return static_cast<std::size_t>(h);
    }
  };
  struct same {
    bool operator()(key_view a, key_view b) const noexcept { return equal(a, b); }
  };

  std::size_t limit_;
  entry_list entries_;  // the most recently used first
  // The keys lie in the entries.
  std::unordered_map<key_view, typename entry_list::iterator, hash, same> index_;
};

}  // namespace jaxbridge
