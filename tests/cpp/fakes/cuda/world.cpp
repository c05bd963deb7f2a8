// SPDX-License-Identifier: Apache-2.0
// How work on streams runs.
#include "fakes/cuda/world.hpp"

#include <cstring>

namespace fake_driver {

std::mutex lock;
std::condition_variable changed;
int blocked = 0;
std::uint64_t generation = 0;
std::unique_ptr<world> now = std::make_unique<world>();

// Not thread_local: LeakSanitizer of clang 14 dies of thread-local memory of a library that was
// opened late.
std::vector<CUcontext>& contexts() { return now->contexts[std::this_thread::get_id()]; }

CUcontext current() { return contexts().empty() ? nullptr : contexts().back(); }

bool is_known(CUcontext c) {
  const auto is = [c](const auto& p) { return p.get() == c; };
  for (const auto& s : now->streams) {
    if (s->context == c) return true;
  }
  return std::any_of(now->primaries.begin(), now->primaries.end(),
                     [&](const auto& p) { return is(p) && p->retains > 0; }) ||
         std::any_of(now->foreign.begin(), now->foreign.end(), is);
}

namespace {

bool is_legacy(CUstream s) { return word(s) == 0 || word(s) == CU_STREAM_LEGACY; }

bool may_start(const work& w) {
  return std::all_of(w.after.begin(), w.after.end(),
                     [](const auto& a) { return a.first->executed >= a.second; });
}

void execute(CUstream s, const work& w) {
  if (w.kind != nullptr) {
    if (std::strcmp(w.kind, "memset") == 0) {
      std::memset(reinterpret_cast<void*>(w.to), static_cast<int>(w.from), w.bytes);
    } else if (w.body != nullptr) {
      w.body(w.words.data(), w.shape.data());
    } else if (std::strcmp(w.kind, "record") != 0) {
      std::memcpy(reinterpret_cast<void*>(w.to), reinterpret_cast<const void*>(w.from), w.bytes);
    }
    now->executions.push_back({w.kind, s, w.to, w.from, w.bytes});
  }
  ++s->executed;
}

bool run_front(CUstream s) {
  if (s->queue.empty() || (s->held != hold::none && !s->draining) || !may_start(s->queue.front())) {
    return false;
  }
  const work w = std::move(s->queue.front());
  s->queue.pop_front();
  execute(s, w);
  return true;
}

// The host waits for `s` up to `position`: held streams that it depends on, and only those, run.
void drain(CUstream s, std::uint64_t position) {
  if (s->held == hold::until_released) return;
  s->draining = true;
  while (s->executed < position && !s->queue.empty()) {
    const work& w = s->queue.front();
    for (const auto& [other, needed] : w.after) {
      if (other->executed < needed) drain(other, needed);
    }
    if (!run_front(s)) break;
  }
  s->draining = false;
}

}  // namespace

CUresult resolve(CUstream handle, CUstream& to) {
  if (word(handle) <= CU_STREAM_PER_THREAD) {
    const CUcontext c = current();
    if (c == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    if (is_legacy(handle)) {
      to = &c->legacy;
    } else {
      to = &c->per_thread[std::this_thread::get_id()];
      to->context = c;
    }
    return CUDA_SUCCESS;
  }
  for (const auto& s : now->streams) {
    if (s.get() == handle) {
      to = handle;
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_INVALID_HANDLE;
}

std::vector<CUstream> blocking_streams(CUcontext c) {
  std::vector<CUstream> all;
  for (const auto& s : now->streams) {
    if (s->context == c && s->blocking) all.push_back(s.get());
  }
  for (auto& [thread, s] : c->per_thread) all.push_back(&s);
  return all;
}

CUresult enqueue(CUstream s, work w) {
  if (s->capture != nullptr) {
    if (s->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    ++s->capture->pieces;
    if (w.kind != nullptr) s->capture->recorded.push_back(std::move(w));
    ++s->captured;
    if (s != s->capture->origin) s->capture->unjoined.insert(s);
    return CUDA_SUCCESS;
  }
  if (capture* c = captured_under(s)) {
    return invalidate(*c, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  }
  if (s == &s->context->legacy) {
    for (CUstream other : blocking_streams(s->context)) {
      w.after.emplace_back(other, other->enqueued);
    }
  } else if (s->blocking) {
    w.after.emplace_back(&s->context->legacy, s->context->legacy.enqueued);
  }
  s->queue.push_back(std::move(w));
  ++s->enqueued;
  pump();
  return CUDA_SUCCESS;
}

void pump() {
  for (bool progress = true; progress;) {
    progress = false;
    for (const auto& s : now->streams) progress = run_front(s.get()) || progress;
    for (auto* list : {&now->primaries, &now->foreign}) {
      for (const auto& c : *list) {
        progress = run_front(&c->legacy) || progress;
        for (auto& [thread, s] : c->per_thread) progress = run_front(&s) || progress;
      }
    }
  }
  changed.notify_all();
}

void wait_for(locked& hold_lock, CUstream s, std::uint64_t position) {
  drain(s, position);
  pump();
  ++blocked;
  changed.notify_all();
  changed.wait(hold_lock, [&] {
    if (s->executed >= position) return true;
    drain(s, position);
    return s->executed >= position;
  });
  --blocked;
  pump();
}

}  // namespace fake_driver
