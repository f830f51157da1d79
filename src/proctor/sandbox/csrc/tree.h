/* The tree stream: how names, metadata and contents of files cross the protocol (stdin of `unpack`, stdout of `pack`, `list`, `stat`).
 *
 * A sequence of records, each a header of 40 bytes (little-endian), then the path, then the target:
 *
 *   u8 kind, u8 0, u16 path length, u32 mode, u32 uid, u32 gid, u32 mtime nanoseconds, u32 target length,
 *   i64 mtime seconds, u64 size
 *
 * kind  'D' directory          'd' metadata of a directory, after its content (unpack only: a read-only directory could not be filled)
 *       'F' regular file       followed, in pack and unpack, by exactly `size` bytes and a u32: 0, or the errno that cut the
 *                              content short (the rest is zeros; ESTALE = it shrank while it was read)
 *       'L' symbolic link      target = where it points
 *       'H' hard link          target = path of the first name, inside the tree (unpack only)
 *       'P' fifo, 'K' socket, 'C' character device, 'B' block device: named by pack, list and stat, never carried
 *       'S' skipped            size = the errno that kept pack from reading it
 *       'E' end                size = number of records before it; without it the stream is not whole
 *
 * Paths are relative to the root of the tree, any bytes but NUL, with no empty, `.` or `..` component; the empty path is the
 * root itself. In `list` a path is a name, in `stat` it is empty. */
#ifndef PROCTOR_TREE_H
#define PROCTOR_TREE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

enum { RECORD_HEADER = 40, TREE_PATH_MAX = 65535, TREE_TARGET_MAX = 4095 };

/* Buffered standard output of a file operation. All return 0, or -1 and errno. */
int out_bytes(const void *bytes, size_t length);
int out_flush(void);
int out_record(char kind, const struct stat *info, uint64_t size, const char *path, size_t path_length, const char *target, size_t target_length);
int out_end(void);

/* Reads exactly `length` bytes of standard input. 0, or -1 and errno (EPROTO when it ends before). */
int in_bytes(void *bytes, size_t length);

/* Says `errno name: path: text` on stderr; returns the exit code 1. */
int complain(const char *path);

char kind_of(mode_t mode);

int tree_pack(const char *path);
int tree_unpack(const char *target);

/* mkdir -p with mode 0755 for what is missing. 0, or -1 and errno. `path` is changed and restored. */
int make_directories(char *path);

#endif
