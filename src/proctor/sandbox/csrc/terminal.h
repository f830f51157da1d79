/* Terminals of commands: a pseudo-terminal of the sandbox's own devpts, made by the child and driven by the guest. */
#ifndef PROCTOR_TERMINAL_H
#define PROCTOR_TERMINAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct terminal_size {
    uint16_t columns, rows; /* both 0 = no terminal */
};

/* ---- in the child --------------------------------------------------------------------------------------------------- */

/* Makes a terminal as root inside (the guest's own id is in no map, and nobody could open what it owns), and sends the guest's
 * end through `status`. Returns the command's end, or -1 and errno. */
int terminal_make(const struct terminal_size *size, int status);

/* Makes `fd` the controlling terminal of the calling session leader and gives it to `uid`. 0, or -1 and errno. */
int terminal_take(int fd, uid_t uid, bool change_owner);

/* ---- in the guest --------------------------------------------------------------------------------------------------- */

/* Reads one message of a child that makes a terminal. Returns its size (0 = the program runs, -1 and errno), and the guest's end
 * of the terminal in `*terminal` when it came (-1 otherwise). */
ssize_t terminal_receive(int status, void *message, size_t size, int *terminal);

int terminal_resize(int terminal, const struct terminal_size *size);

/* The character that means end of input to whoever reads this terminal now. */
uint8_t terminal_end_mark(int terminal);

/* Whether a read would give something now. A read or a poll moves what the kernel still holds back, FIONREAD does not. */
bool terminal_readable(int terminal);

#endif
