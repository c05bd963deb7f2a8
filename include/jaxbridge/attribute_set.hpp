// SPDX-License-Identifier: Apache-2.0
// Attributes that are made, rather than read: for calls of a shape function, and for tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "abi/xla_ffi.hpp"
#include "dtype.hpp"

namespace jaxbridge {
inline namespace v1 {

/// A dictionary of attributes, in XLA's order: by name.
class attribute_set {
 public:
  template <class T>
  attribute_set& scalar(const std::string& name, T value) {
    return raw_scalar(name, static_cast<int>(dtype_of<T>), &value, sizeof(value));
  }
  attribute_set& raw_scalar(std::string name, int type, const void* value, std::size_t bytes) {
    entry& e = fresh(std::move(name), abi::xla_ffi::attribute_scalar);
    e.bytes.assign(static_cast<const char*>(value), bytes);
    e.number.dtype = type;
    return *this;
  }
  attribute_set& string(std::string name, std::string value) {
    fresh(std::move(name), abi::xla_ffi::attribute_string).bytes = std::move(value);
    return *this;
  }
  template <class T>
  attribute_set& array(const std::string& name, const std::vector<T>& values) {
    return raw_array(name, static_cast<int>(dtype_of<T>), values.data(), values.size(), sizeof(T));
  }
  attribute_set& raw_array(std::string name, int type, const void* data, std::size_t count,
                           std::size_t item_bytes) {
    entry& e = fresh(std::move(name), abi::xla_ffi::attribute_array);
    if (count > 0) e.bytes.assign(static_cast<const char*>(data), count * item_bytes);
    e.numbers.dtype = type;
    e.numbers.size = count;
    return *this;
  }
  /// An empty dictionary, to be filled; it lives as long as this object.
  attribute_set& dictionary(std::string name) {
    entry& e = fresh(std::move(name), abi::xla_ffi::attribute_dictionary);
    e.nested = std::make_unique<attribute_set>();
    return *e.nested;
  }
  attribute_set& remove(const std::string& name) {
    entries_.erase(name);
    return *this;
  }

  /// XLA's form of it: as long as this object, until it is changed.
  abi::xla_ffi::attributes& build() {
    namespace ffi = abi::xla_ffi;
    types_.clear();
    names_.clear();
    values_.clear();
    for (auto& [name, e] : entries_) {
      e.name = {name.data(), name.size()};
      void* value = nullptr;
      switch (e.type) {
        case ffi::attribute_string:
          e.text = {e.bytes.data(), e.bytes.size()};
          value = &e.text;
          break;
        case ffi::attribute_scalar:
          e.number.value = aligned(e);
          value = &e.number;
          break;
        case ffi::attribute_array:
          e.numbers.data = aligned(e);
          value = &e.numbers;
          break;
        case ffi::attribute_dictionary:
          value = &e.nested->build();
          break;
      }
      types_.push_back(e.type);
      names_.push_back(&e.name);
      values_.push_back(value);
    }
    raw_ = {sizeof(raw_),  nullptr,       static_cast<std::int64_t>(types_.size()),
            types_.data(), names_.data(), values_.data()};
    return raw_;
  }

 private:
  struct entry {
    abi::xla_ffi::attribute_type type{};
    std::string bytes;  // the text, or what scalar and array point to
    std::vector<std::max_align_t> memory;
    abi::xla_ffi::byte_span text{};
    abi::xla_ffi::scalar number{};
    abi::xla_ffi::array numbers{};
    std::unique_ptr<attribute_set> nested;
    abi::xla_ffi::byte_span name{};
  };

  entry& fresh(std::string name, abi::xla_ffi::attribute_type type) {
    entry& e = entries_[std::move(name)];
    e = entry{};
    e.type = type;
    return e;
  }

  // A short string's bytes lie wherever they happen to.
  static void* aligned(entry& e) {
    e.memory.resize(e.bytes.size() / sizeof(std::max_align_t) + 1);
    std::memcpy(e.memory.data(), e.bytes.data(), e.bytes.size());
    return e.memory.data();
  }

  std::map<std::string, entry> entries_;
  std::vector<abi::xla_ffi::attribute_type> types_;
  std::vector<abi::xla_ffi::byte_span*> names_;
  std::vector<void*> values_;
  abi::xla_ffi::attributes raw_{};
};

}  // namespace v1
}  // namespace jaxbridge
