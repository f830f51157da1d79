/* Who a child runs as, looked up in the sandbox's own files (they are the candidate's to write, so they are parsed warily). */
#ifndef PROCTOR_USER_H
#define PROCTOR_USER_H

#include <sys/types.h>

enum { USER_GROUPS_MAX = 256, USER_TEXT_MAX = 1024 };

struct user {
    uid_t uid;
    gid_t gid;
    size_t group_count;
    gid_t groups[USER_GROUPS_MAX];
    char name[USER_TEXT_MAX], home[USER_TEXT_MAX];
};

/* `text` is `name`, `uid`, or either with `:group` or `:gid`. A number that /etc/passwd does not know gets group 0, no other
 * groups and the home `/`. 0, or -1 and errno (ENOENT: no such user or group; EINVAL: not a user at all). */
int user_lookup(const char *text, struct user *user);

#endif
