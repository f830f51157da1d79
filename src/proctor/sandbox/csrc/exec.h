/* An exec request and the child that carries it out. */
#ifndef PROCTOR_EXEC_H
#define PROCTOR_EXEC_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "frame.h"
#include "group.h"
#include "guest.h"
#include "terminal.h"

enum request_tag {
    TAG_ARG = 1,
    TAG_ENV = 2,
    TAG_CWD = 3,
    TAG_USER = 4,
    TAG_FLAGS = 5,
    TAG_REPORT = 6,
    TAG_BUILTIN = 7,
    TAG_TERMINAL = 8,
};

enum request_flag {
    EXEC_STDIN = 1,     /* stdin is connected; otherwise it is /dev/null */
    EXEC_KEEP = 2,      /* what the main process leaves behind lives on */
    EXEC_MERGE = 4,     /* stderr goes where stdout goes */
    EXEC_LOGIN_ENV = 8, /* HOME, USER and LOGNAME are added from /etc/passwd where the environment lacks them */
    EXEC_STARTED = 16,  /* the host wants to know when the program runs */
    EXEC_FLAGS_ALL = 31,
};

enum { REQUEST_ITEMS_MAX = 32768, REPORT_FD_MAX = 255, FILES_SOFT = 65536 };

struct exec_request {
    uint32_t flags;
    int report_fd; /* -1 = none */
    struct terminal_size terminal;
    size_t argc, envc;
    const char *cwd, *user, *builtin; /* NULL = not given */
    char **argv, **envp;              /* point into static tables: one request is parsed at a time */
};

/* Parses a request in place (strings are terminated there; `bytes` has one spare byte). 0, or -1 when it is malformed. */
int request_parse(uint8_t *bytes, size_t length, struct exec_request *request);

/* The guest's ends of a child's pipes; -1 where there is none. */
struct exec_pipes {
    int streams[SUB_COUNT];
    int status; /* what stopped the child before its program ran: i32 errno and the step's name; end-of-file when it runs.
                 * With a terminal it is a socket, and the guest's end of the terminal comes first (terminal_receive). */
};

/* What the guest prepared once, at its start, for all children. */
struct exec_setup {
    const struct guest_config *config;
    int null_fd;
    uint64_t capabilities; /* what a child may have as uid 0 */
};

/* Once, in the guest: fills `setup` and puts in place what children inherit. 0, or -1 and errno. */
int exec_prepare(struct exec_setup *setup, const struct guest_config *config);

/* Makes the pipes, forks into `group` and sets the child up. Returns the pid; -1 and errno, and the step's name. */
pid_t exec_spawn(const struct exec_setup *setup, const struct exec_request *request, const struct exec_group *group,
                 struct exec_pipes *pipes, const char **step);

#endif
