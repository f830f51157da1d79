/* The probe: a program that the isolation self-test runs inside a sandbox. It tries what must not work and prints what happened,
 * one `key<TAB>value` to the line. It judges nothing: the host does (proctor.sandbox.selftest). */
#ifndef PROCTOR_PROBE_H
#define PROCTOR_PROBE_H

#include <stddef.h>

/* One fact. Line ends and tabs in the value become spaces. */
void say(const char *key, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The name of the present `errno`, or "ok" when `result` is not negative. */
const char *outcome(long result);

/* What `attempt` returns in a process of its own, whose changes to itself go with it: "ok", the name of an errno, or "signal N". */
const char *apart(long (*attempt)(const void *), const void *argument);

void tell_identity(void);
/* Unless `whole`, no 32-bit call is tried: it ends in a line of the kernel's log, which can take it 20 ms to write. */
void tell_calls(int whole);
void tell_process_one(void);
void tell_files(void);
void tell_mounts(void);
/* Unless `whole`, nobody looks for listeners: for that the kernel goes through all the machine's connections, which takes 7 ms. */
void tell_network(int whole);

/* Puts a load on the sandbox, or makes what a host has to deal with: see burdens.c. An exit status. */
int burden(int argc, char **argv);

/* Talks to the carried network: see talk.c. An exit status. */
int talk(int argc, char **argv);

#endif
