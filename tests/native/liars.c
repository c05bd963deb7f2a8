// SPDX-License-Identifier: Apache-2.0
// Libraries that say of themselves what is not so; LIE picks one. The structs are those of
// include/jaxbridge/abi/native_library.hpp.
#include <stddef.h>
#include <stdint.h>

struct text {
  const char* data;
  size_t size;
};
struct frame;
struct function {
  size_t struct_size;
  const struct function* next;
  struct text name, doc, signatures, parameters;
  const struct text* results;
  size_t result_count;
  struct text vmap_method;
  uint32_t platform, flags;
  void* (*execute)(struct frame*);
  void* (*initialize)(struct frame*);
  int32_t (*shapes)(const void*, void*, size_t, char*, size_t);
  const uint64_t* calls;
};
struct library {
  size_t struct_size;
  uint32_t major;
  const struct function* first;
};

#define TEXT(s) \
  { s, sizeof(s) - 1 }
static uint64_t calls;
// Answers what the handler is, as abi/xla_ffi.hpp has it.
struct metadata {
  size_t struct_size;
  struct {
    size_t struct_size;
    void* extensions;
    int major, minor;
  } version;
  uint32_t traits;
};
struct question {
  size_t struct_size;
  int type;
  struct question* next;
  struct metadata* answer;
};
struct frame {
  size_t struct_size;
  struct question* question;
};
static void* handler(struct frame* frame) {
#if LIE != 0
  if (frame->question != NULL) frame->question->answer->version.minor = 1;
#endif
  (void)frame;
  return NULL;
}
static void* no_handler(struct frame* frame) { return frame == NULL ? &calls : NULL; }
static struct function one = {sizeof(struct function),
                              NULL,
                              TEXT("one"),
                              TEXT(""),
                              TEXT("float32[*], out float32[*]"),
                              TEXT("x"),
                              NULL,
                              0,
                              TEXT(""),
                              0,
                              0,
                              &handler,
                              NULL,
                              NULL,
                              &calls};
#ifndef RULE
#define RULE ""
#endif
static const struct text rule = TEXT(RULE);
static struct library all = {sizeof(struct library), 1, &one};

__attribute__((visibility("default"))) const struct library* jaxbridge_library_v1(void) {
#if LIE == 1
  return (const struct library*)8;
#elif LIE == 2
  all.struct_size = 3;
#elif LIE == 3
  all.major = 7;
#elif LIE == 4
  all.first = (const struct function*)0x7fff12345678;
#elif LIE == 5
  one.next = &one;
#elif LIE == 6
  one.name.size = (size_t)1 << 40;
#elif LIE == 7
  one.name = (struct text)TEXT("not a name");
#elif LIE == 8
  one.signatures = (struct text)TEXT("float33[*], out float32[*]");
#elif LIE == 9
  one.parameters = (struct text)TEXT("x, y, z");
#elif LIE == 10
  one.execute = (void* (*)(struct frame*))0x1234;
#elif LIE == 11
  one.calls = (const uint64_t*)((const char*)&calls + 1);
#elif LIE == 12
  one.result_count = 5;
#elif LIE == 13
  one.platform = 9;
#elif LIE == 14
  one.signatures.data = NULL;
#elif LIE == 15
  one.initialize = &no_handler;
#elif LIE == 16
  one.struct_size = 16;
#elif LIE == 17
  one.doc = (struct text)TEXT("no UTF-8: \xff\xfe");
#elif LIE == 18
  one.parameters = (struct text)TEXT("lambda");
#elif LIE == 19
  one.vmap_method = (struct text)TEXT("typo");
#elif LIE == 20
  one.vmap_method = (struct text)TEXT("sequential");
  one.flags = 1;
#elif LIE == 21
  one.signatures = (struct text)TEXT("float32[*], float64, out float32[*]");
  one.parameters = (struct text)TEXT("x, a = 'text'");
#elif LIE == 22
  one.parameters = (struct text)TEXT("x[2 * k]");
#elif LIE >= 23
  one.results = &rule;
  one.result_count = 1;
#endif
  (void)&no_handler;
  (void)&rule;
  return &all;
}
