/* File operations: the programs that are part of the guest. They run in a forked child that already is who it has to be. */
#ifndef PROCTOR_FILES_H
#define PROCTOR_FILES_H

#include <stddef.h>

int builtin_known(const char *name);

/* Runs one to its end; returns its exit code (0, or 1 after one line on stderr: `errno name: text`). */
int builtin_main(const char *name, size_t argc, char **argv);

#endif
