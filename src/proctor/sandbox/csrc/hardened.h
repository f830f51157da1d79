/* Every hardening step has a name, so that a test can build a binary in which one of them is left out, and see the self-test go red.
 * In every other build `hardened` is the constant 1: there is nothing by which a step could be left out. */
#ifndef PROCTOR_HARDENED_H
#define PROCTOR_HARDENED_H

#ifdef PROCTOR_WEAKEN
#include <string.h>
extern const char *weakened_step; /* what follows "--" in the program's name */
static inline int hardened(const char *step) { return weakened_step == NULL || strcmp(weakened_step, step) != 0; }
#else
#define hardened(step) 1
#endif

#endif
