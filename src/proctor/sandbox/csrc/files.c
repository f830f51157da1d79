#include "files.h"
int builtin_known(const char *name) { return name == (void*)0; }
int builtin_main(const char *name, size_t argc, char **argv) { (void)name; (void)argc; (void)argv; return 1; }
