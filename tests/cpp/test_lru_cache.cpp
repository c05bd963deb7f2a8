// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "core/lru_cache.hpp"

namespace jaxbridge {
namespace {

using words = std::vector<std::uintptr_t>;

TEST(LruCache, FindsExactlyWhatWasPut) {
  lru_cache<int> cache(10);
  EXPECT_EQ(cache.find(words{1, 2}), nullptr);
  EXPECT_TRUE(cache.insert(words{1, 2}, 12).empty());
  EXPECT_TRUE(cache.insert(words{2, 1}, 21).empty());
  EXPECT_TRUE(cache.insert(words{}, 0).empty());
  ASSERT_NE(cache.find(words{1, 2}), nullptr);
  EXPECT_EQ(*cache.find(words{1, 2}), 12);
  EXPECT_EQ(*cache.find(words{2, 1}), 21);
  EXPECT_EQ(*cache.find(words{}), 0);
  EXPECT_EQ(cache.find(words{1}), nullptr);
  EXPECT_EQ(cache.find(words{1, 2, 3}), nullptr);
  EXPECT_EQ(cache.size(), 3U);
}

TEST(LruCache, TheLeastRecentlyUsedGoes) {
  lru_cache<int> cache(2);
  EXPECT_TRUE(cache.insert(words{1}, 1).empty());
  EXPECT_TRUE(cache.insert(words{2}, 2).empty());
  ASSERT_NE(cache.find(words{1}), nullptr);
  const auto gone = cache.insert(words{3}, 3);
  ASSERT_EQ(gone.size(), 1U);
  EXPECT_EQ(gone.front().first, words{2});
  EXPECT_EQ(gone.front().second, 2);
  EXPECT_EQ(cache.find(words{2}), nullptr);
  EXPECT_NE(cache.find(words{1}), nullptr);
  EXPECT_NE(cache.find(words{3}), nullptr);
  EXPECT_EQ(cache.size(), 2U);
  EXPECT_EQ(cache.limit(), 2U);
}

TEST(LruCache, OfNoSizeKeepsNothing) {
  lru_cache<int> cache(0);
  EXPECT_TRUE(cache.insert(words{1}, 1).empty());
  EXPECT_EQ(cache.find(words{1}), nullptr);
  EXPECT_EQ(cache.size(), 0U);
}

TEST(LruCache, EraseGivesTheEntryBack) {
  lru_cache<std::shared_ptr<int>> cache(2);
  const auto value = std::make_shared<int>(7);
  EXPECT_TRUE(cache.insert(words{1}, value).empty());
  EXPECT_TRUE(cache.erase(words{2}).empty());
  {
    const auto gone = cache.erase(words{1});
    ASSERT_EQ(gone.size(), 1U);
    EXPECT_EQ(gone.front().second, value);
  }
  EXPECT_EQ(value.use_count(), 1);
  EXPECT_EQ(cache.find(words{1}), nullptr);
  EXPECT_TRUE(cache.insert(words{1}, value).empty());
  EXPECT_NE(cache.find(words{1}), nullptr);
}

TEST(LruCache, ManyKeysOfOneHashBucket) {
  lru_cache<std::uintptr_t> cache(1000);
  for (std::uintptr_t i = 0; i < 3000; ++i) {
    const auto gone = cache.insert(words{i << 20, ~i}, i);
    EXPECT_EQ(gone.size(), i < 1000 ? 0U : 1U);
  }
  for (std::uintptr_t i = 0; i < 3000; ++i) {
    const std::uintptr_t* const found = cache.find(words{i << 20, ~i});
    EXPECT_EQ(found != nullptr, i >= 2000);
    if (found != nullptr) {
      EXPECT_EQ(*found, i);
    }
  }
}

}  // namespace
}  // namespace jaxbridge
